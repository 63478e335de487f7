"""Repair tasks in the manner of SWE tasks: a small repository with failing tests, a shell and an editor to fix it.

The agent works with the tools `shell`, `edit`, `write` and `submit`. Every command runs in a fresh sandbox that holds
the repository as the agent left it. The reward is 1 if the package then passes every check of the tests and every
hidden check, else 0. Changing the tests does not help: calls run in the sandbox, and their results are compared
outside with values that never enter it.

Guarantees: the same seed gives the same repository; files persist over the turns of an episode and nowhere else. File
modes, links and empty folders do not persist. A command that leaves more than 1 MB or 150 files, or that breaks a limit
of the sandbox, does not change the files.
"""

import base64
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from headway.environments.library.repair_repository import RepairCheck, RepairRepository, make_repository
from headway.environments.response_parsing import parse_tool_calls
from headway.environments.text_environment import Reply
from headway.environments.tools.base import StaticToolSource, Tool, ToolRefused, make_schema
from headway.environments.tools.python_tool import get_shared_sandbox, require_sandbox
from headway.environments.tools.toolbox import Toolbox, describe_tools
from headway.errors import ConfigError, EnvironmentFailed
from headway.sandbox import SandboxBroken, SandboxLimits, SandboxRefused

_MAX_FILES, _MAX_BYTES = 150, 1 << 20
_LIMITS = SandboxLimits(memory_mb=512, disk_mb=16, output_kb=4096)
_SANDBOX_GRACE_S = 5.0
_TASK = """You are repairing a small Python repository: some of its tests fail because of a mistake in the package.
Find and fix the mistake in the package; changing the tests does not help. Call `submit` when you are done."""

_PROGRAMS = files("headway.environments.library")
_RUN_PROGRAM = _PROGRAMS.joinpath("repair_shell.txt").read_text(encoding="utf-8")
"""Program that runs a command in the sandbox and reports its output and the files that it left."""
_JUDGE_PROGRAM = _PROGRAMS.joinpath("repair_judge.txt").read_text(encoding="utf-8")
"""Program that calls the functions of the repository in the sandbox and reports their results."""


class RepairEnvironment:
    """Plays one repair task per episode; `data` is not used."""

    reusable = True

    def __init__(
        self, *, modules: int = 3, bugs: int = 1, max_steps: int = 20, timeout_s: float = 10.0, longest: int = 4000
    ) -> None:
        require_sandbox("repair")
        make_repository(0, modules=modules, bugs=bugs)  # raises ConfigError for wrong sizes
        if max_steps < 2:
            raise ConfigError("nothing is repaired in fewer than 2 steps", key="max_steps", value=max_steps)
        self.max_steps = max_steps
        self._sizes = {"modules": modules, "bugs": bugs}
        self._timeout_s = timeout_s
        self.workspace = RepairWorkspace(timeout_s)
        tools = self._make_tools()
        self._toolbox = Toolbox([StaticToolSource(*tools)], longest=longest)
        self.instructions = f"{_TASK}\n\n{describe_tools(tools)}"

    async def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        await self._toolbox.begin()
        self.repository: RepairRepository = make_repository(seed, **self._sizes)
        self.workspace.load(self.repository.files)
        self._steps, self._submitted = 0, False
        listed = "\n".join(sorted(self.workspace.files))
        return f"The tests of this repository fail (`python3 -m unittest`). Repair it.\n\n{listed}"

    async def step(self, action: str) -> Reply:
        self._steps += 1
        calls = parse_tool_calls(action).calls
        results = await self._toolbox.call_tools(calls) if calls else None
        valid = results is not None and not results.counts["malformed"]
        text = results.text if results else "Call one of the tools; `submit` when the repository is repaired."
        if not self._submitted and self._steps < self.max_steps:
            return Reply(text, valid=valid)
        shown, hidden = await score_repository(self.repository, self.workspace.files, timeout_s=self._timeout_s)
        reward = float(shown == hidden == 1.0)
        info = {"shown": shown, "hidden": hidden, "submitted": self._submitted}
        return Reply(text, reward, done=True, valid=valid, success=reward == 1.0, info=info)

    def _make_tools(self) -> list[Tool]:
        async def submit() -> str:
            if self._submitted:
                raise ToolRefused("submitted already")
            self._submitted = True
            return "Submitted."

        def make(name: str, description: str, call: Callable[..., Awaitable[str]], *parameters: str) -> Tool:
            schema = make_schema(dict.fromkeys(parameters, "string"))
            return Tool(name=name, description=description, parameters=schema, call=lambda given: call(**given))

        workspace = self.workspace
        return [
            make("shell", "Run a command of sh in the repository's folder.", workspace.run, "command"),
            make("edit", "Replace a text that a file has exactly once.", workspace.edit, "path", "old", "new"),
            make("write", "Write a whole file, new or not.", workspace.write, "path", "content"),
            make("submit", "The repository is repaired: end the task.", submit),
        ]


class RepairWorkspace:
    """The files of the current episode, kept in memory. A command gets a copy, and the files it leaves come back."""

    def __init__(self, timeout_s: float) -> None:
        self.files: dict[str, bytes] = {}
        self._timeout_s = timeout_s

    def load(self, files: Mapping[str, str]) -> None:
        self.files = {path: text.encode() for path, text in files.items()}

    async def run(self, command: str) -> str:
        """Run a shell command and return its output. Raises `ToolRefused` if it exceeded a limit."""
        limits = [str(self._timeout_s), str(_MAX_FILES), str(_MAX_BYTES)]
        stdin = command.encode(errors="replace").decode()
        stdout, ending = await _run_in_sandbox(_RUN_PROGRAM, self.files, self._timeout_s, arguments=limits, stdin=stdin)
        try:
            report = json.loads(stdout)
            output = base64.b64decode(report["said"]).decode(errors="replace").rstrip()
            exit_code, files = report["exit"], _parse_reported_files(report["files"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ToolRefused(f"the command broke off ({ending}); the files are as they were") from None
        notes = [output] if output else []
        if exit_code is None:
            notes.append(f"[ended after {self._timeout_s:g} s]")
        elif exit_code != 0:
            notes.append(f"[exit code {exit_code}]")
        if files is None:
            notes.append(f"[more than {_MAX_FILES} files or {_MAX_BYTES} bytes; the files are as they were]")
        else:
            self.files = files
        return "\n".join(notes) or "[no output]"

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file. Raises `ToolRefused` unless the file contains `old` exactly once."""
        name = _check_path(path)
        if name not in self.files:
            raise ToolRefused(f"there is no file {path}")
        text = self.files[name].decode(errors="replace")
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolRefused(f"{path} has that text {count} times, not once")
        return await self.write(path, text.replace(old, new))

    async def write(self, path: str, content: str) -> str:
        name = _check_path(path)
        files = {**self.files, name: content.encode(errors="replace")}
        _check_files(files)
        self.files = files
        return f"Wrote {name}."


async def score_repository(
    repository: RepairRepository, files: Mapping[str, bytes], *, timeout_s: float
) -> tuple[float, float]:
    """Return the fractions of the shown and of the hidden checks that the package passes."""
    package = {path: content for path, content in files.items() if path.startswith(f"{repository.package}/")}
    checks = repository.checks
    calls = [[f"{repository.package}.{check.module}", check.function, list(check.arguments)] for check in checks]
    stdout, _ = await _run_in_sandbox(_JUDGE_PROGRAM, package, timeout_s, stdin=json.dumps(calls))
    try:
        results = json.loads(stdout)
    except (ValueError, RecursionError):
        results = []
    if not isinstance(results, list) or len(results) != len(calls):
        return 0.0, 0.0
    pairs = list(zip(checks, results, strict=True))
    return _passed_fraction(pairs, shown=True), _passed_fraction(pairs, shown=False)


def _passed_fraction(pairs: Sequence[tuple[RepairCheck, Any]], *, shown: bool) -> float:
    passed = [_is_outcome(result, check.expected) for check, result in pairs if check.shown is shown]
    return sum(passed) / len(passed)


def _is_outcome(result: Any, expected: Any) -> bool:
    """Return whether a call ended as expected; a value that looks like a raised exception is none."""
    match expected:
        case {"raises": name}:
            return bool(result == ["raised", name])
    return isinstance(result, list) and result[:1] == ["returned"] and _is_equal_json(result[1:], [expected])


def _is_equal_json(result: Any, expected: Any) -> bool:
    """Compare two JSON values; numbers are equal up to rounding."""
    if isinstance(expected, bool) or isinstance(result, bool):
        return result is expected
    if isinstance(expected, int | float) and isinstance(result, int | float):
        return math.isclose(result, expected, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(expected, list | tuple) and isinstance(result, list):
        return len(result) == len(expected) and all(map(_is_equal_json, result, expected))
    if isinstance(expected, dict) and isinstance(result, dict):
        return result.keys() == expected.keys() and all(_is_equal_json(result[key], expected[key]) for key in expected)
    return type(result) is type(expected) and bool(result == expected)


async def _run_in_sandbox(
    code: str, files: Mapping[str, bytes], timeout_s: float, *, arguments: Sequence[str] = (), stdin: str = ""
) -> tuple[str, str]:
    """Run a program on the files and return its output and how it ended."""
    limits = replace(_LIMITS, wall_s=timeout_s + _SANDBOX_GRACE_S, cpu_s=int(timeout_s + _SANDBOX_GRACE_S) + 1)
    inside = {f"repository/{path}": content for path, content in files.items()}
    try:
        outcome = await get_shared_sandbox().run_python(
            code, arguments=arguments, stdin=stdin, files=inside, limits=limits
        )
    except (SandboxRefused, SandboxBroken) as error:
        raise EnvironmentFailed(f"repair: {error}") from error
    return outcome.stdout, str(outcome.ending)


def _parse_reported_files(files: Any) -> dict[str, bytes] | None:
    """Return the files of a report, which is not trusted. Raises `ToolRefused`, or what a malformed report raises."""
    if files is None:
        return None
    parsed = {_check_path(path): base64.b64decode(content) for path, content in files.items()}
    _check_files(parsed)
    return parsed


def _check_files(files: Mapping[str, bytes]) -> None:
    if len(files) > _MAX_FILES or sum(map(len, files.values())) > _MAX_BYTES:
        raise ToolRefused(f"more than {_MAX_FILES} files or {_MAX_BYTES} bytes")
    for path in files:
        above = next((str(folder) for folder in PurePosixPath(path).parents if str(folder) in files), None)
        if above is not None:
            raise ToolRefused(f"{above} is a file, so there is no {path}")


def _check_path(path: str) -> str:
    """Return the normalised path. Raises `ToolRefused` if it is not inside the repository."""
    parsed = PurePosixPath(path)
    is_inside = parsed.parts and not parsed.is_absolute() and ".." not in parsed.parts
    if not is_inside or not path.isprintable() or len(path.encode(errors="replace")) > 200:
        raise ToolRefused(f"{path[:200]!r} is no path inside the repository")
    return str(parsed)
