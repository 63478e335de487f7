"""Repair in the manner of SWE tasks: a small repository whose tests fail, a shell and an editor to make them pass.

The agent works with tools: `shell`, `edit`, `write`, `submit`. Commands run in the sandbox, each in a fresh one that
holds the repository as the agent left it. The reward is 1 where the package then answers every call of the tests, and
every one of others that the agent has not seen, as it should; else 0. What the agent did to the tests does not matter:
calls are made in the sandbox, and compared out here with values that never go in.

Guarantees: the same seed is the same repository; files persist over the turns of an episode and nowhere else. Modes,
links and empty folders do not persist, nor does a folder of more than 1 MB or 150 files: then it stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.environments.library.repair_bugs import Repository, make_repository
from headway.environments.library.repair_workspace import Workspace, passed
from headway.environments.text import Reply
from headway.environments.tools.base import Always, Arguments, Tool, ToolRefused
from headway.environments.tools.calls import read_calls
from headway.environments.tools.python import check_sandbox
from headway.environments.tools.toolbox import Toolbox, described
from headway.errors import ConfigError

_TASK = """You are repairing a small Python repository: some of its tests fail because of a mistake in the package.
Find and fix the mistake in the package; changing the tests does not help. Call `submit` when you are done."""


class Repair:
    """One episode at a time; `data` is not used."""

    reusable = True

    def __init__(
        self, *, modules: int = 3, bugs: int = 1, max_steps: int = 20, timeout_s: float = 10.0, longest: int = 4000
    ) -> None:
        check_sandbox("repair")
        make_repository(0, modules=modules, bugs=bugs)  # says what is wrong with the sizes
        if max_steps < 2:
            raise ConfigError("nothing is repaired in fewer than 2 steps", key="max_steps", value=max_steps)
        self.max_steps = max_steps
        self._sizes = {"modules": modules, "bugs": bugs}
        self._timeout_s = timeout_s
        self._box = Toolbox([Always(*self._tools())], longest=longest)
        self.instructions = f"{_TASK}\n\n{described(self._tools())}"

    async def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        await self._box.begin()
        self.repository: Repository = make_repository(seed, **self._sizes)
        self.workspace = Workspace(self.repository.files, timeout_s=self._timeout_s)
        self._steps, self._submitted = 0, False
        listed = "\n".join(sorted(self.workspace.files))
        return f"The tests of this repository fail (`python3 -m unittest`). Repair it.\n\n{listed}"

    async def step(self, action: str) -> Reply:
        self._steps += 1
        said = read_calls(action)
        answers = await self._box.answer(said.calls) if said.calls else None
        valid = answers is not None and not answers.malformed
        text = answers.text if answers else "Call one of the tools; `submit` when the repository is repaired."
        if not self._submitted and self._steps < self.max_steps:
            return Reply(text, valid=valid)
        shown, hidden = await passed(self.repository, self.workspace.files, timeout_s=self._timeout_s)
        reward = float(shown == hidden == 1.0)
        info = {"shown": shown, "hidden": hidden, "submitted": self._submitted}
        return Reply(text, reward, done=True, valid=valid, success=reward == 1.0, info=info)

    def _tools(self) -> list[Tool]:
        async def shell(arguments: Arguments) -> str:
            return await self.workspace.run(arguments["command"])

        async def edit(arguments: Arguments) -> str:
            return self.workspace.edit(arguments["path"], arguments["old"], arguments["new"])

        async def write(arguments: Arguments) -> str:
            return self.workspace.write(arguments["path"], arguments["content"])

        async def submit(arguments: Arguments) -> str:
            if self._submitted:
                raise ToolRefused("submitted already")
            self._submitted = True
            return "Submitted."

        return [
            _tool("shell", "Run a command of sh in the repository's folder.", shell, "command"),
            _tool("edit", "Replace a text that a file has exactly once.", edit, "path", "old", "new"),
            _tool("write", "Write a whole file, new or not.", write, "path", "content"),
            _tool("submit", "The repository is repaired: end the task.", submit),
        ]


def _tool(name: str, description: str, call: Any, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return Tool(name=name, description=description, parameters=schema, call=call)
