"""The folder an agent repairs: files in memory, commands in the sandbox, judgement from outside.

A command gets the files, and what it left of them comes back with its output. Whatever it writes about them can only
change these files. Where a command breaks its sandbox's limits, the files stay as they were.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from headway.environments.library.repair_repository import RepairCheck, RepairRepository, make_repository
from headway.environments.response_parsing import parse_tool_calls
from headway.environments.text_environment import Reply
from headway.environments.tools.base import StaticToolSource, Tool, ToolArguments, ToolRefused
from headway.environments.tools.python_tool import get_shared_sandbox, require_sandbox
from headway.environments.tools.toolbox import Toolbox, describe_tools
from headway.errors import ConfigError, EnvironmentFailed
from headway.sandbox import SandboxBroken, SandboxLimits, SandboxRefused

_MAX_FILES, _MAX_BYTES = 150, 1 << 20
_LIMITS = SandboxLimits(memory_mb=512, disk_mb=16, output_kb=4096)
_SANDBOX_GRACE_S = 5.0

_RUN_PROGRAM = """
import base64, json, os, signal, subprocess, sys
command, limit_s, most_files, most_bytes = sys.stdin.read(), float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
environment = dict(os.environ, PATH=os.path.dirname(sys.executable) + ":" + os.environ["PATH"])
os.makedirs("repository", exist_ok=True)
ended = None
with open("output", "wb") as output:
    child = subprocess.Popen(
        ["/bin/sh", "-c", command], cwd="repository", stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.STDOUT, start_new_session=True, env=environment)
    try:
        ended = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
with open("output", "rb") as output:
    said = output.read(200_000)
files, size, fits = {}, 0, True
for folder, names, leaves in os.walk("repository"):
    names[:] = sorted(name for name in names if name not in ("__pycache__", ".git"))
    for leaf in sorted(leaves):
        path = os.path.join(folder, leaf)
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        size += os.path.getsize(path)
        if size > most_bytes or len(files) >= most_files:
            fits = False
            break
        with open(path, "rb") as file:
            files[os.path.relpath(path, "repository")] = base64.b64encode(file.read()).decode()
report = {"exit": ended, "said": base64.b64encode(said).decode(), "files": files if fits else None}
print(json.dumps(report))
"""

_JUDGE_PROGRAM = """
import importlib, json, os, sys
calls = json.load(sys.stdin)
report = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, "repository")
results = []
for module, function, arguments in calls:
    try:
        result = [getattr(importlib.import_module(module), function)(*arguments)]
        json.dumps(result)
    except BaseException as error:
        result = [{"raises": type(error).__name__}]
    results.append(result[0])
os.write(report, json.dumps(results).encode())
"""


class RepairWorkspace:
    """The files of one episode."""

    def __init__(self, files: Mapping[str, str], *, timeout_s: float) -> None:
        self.files: dict[str, bytes] = {path: text.encode() for path, text in files.items()}
        self._timeout_s = timeout_s

    async def run(self, command: str) -> str:
        """What a command says. Raises `ToolRefused` where it took too much."""
        limits = [str(self._timeout_s), str(_MAX_FILES), str(_MAX_BYTES)]
        stdin = command.encode(errors="replace").decode()
        stdout, ending = await _run_in_sandbox(_RUN_PROGRAM, self.files, self._timeout_s, arguments=limits, stdin=stdin)
        try:
            report = json.loads(stdout)
            said = base64.b64decode(report["said"]).decode(errors="replace").rstrip()
            ended, files = report["exit"], _parse_reported_files(report["files"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ToolRefused(f"the command broke off ({ending}); the files are as they were") from None
        notes = [said] if said else []
        if ended is None:
            notes.append(f"[ended after {self._timeout_s:g} s]")
        elif ended != 0:
            notes.append(f"[exit code {ended}]")
        if files is None:
            notes.append(f"[more than {_MAX_FILES} files or {_MAX_BYTES} bytes; the files are as they were]")
        else:
            self.files = files
        return "\n".join(notes) or "[no output]"

    def edit(self, path: str, old: str, new: str) -> str:
        """Raises `ToolRefused` where the file does not have `old` exactly once."""
        name = _check_path(path)
        if name not in self.files:
            raise ToolRefused(f"there is no file {path}")
        text = self.files[name].decode(errors="replace")
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolRefused(f"{path} has that text {count} times, not once")
        return self.write(path, text.replace(old, new))

    def write(self, path: str, content: str) -> str:
        name = _check_path(path)
        files = {**self.files, name: content.encode(errors="replace")}
        _check_files(files)
        self.files = files
        return f"Wrote {name}."


async def score_repository(
    repository: RepairRepository, files: Mapping[str, bytes], *, timeout_s: float
) -> tuple[float, float]:
    """Shares of the shown and of the hidden calls that the package answers rightly."""
    package = {path: content for path, content in files.items() if path.startswith(f"{repository.package}/")}
    asked = [[f"{repository.package}.{call.module}", call.function, list(call.arguments)] for call in repository.calls]
    stdout, _ = await _run_in_sandbox(_JUDGE_PROGRAM, package, timeout_s, stdin=json.dumps(asked))
    try:
        results = json.loads(stdout)
    except (ValueError, RecursionError):
        results = []
    if not isinstance(results, list) or len(results) != len(asked):
        return 0.0, 0.0
    pairs = list(zip(repository.calls, results, strict=True))
    return _passed_fraction(pairs, shown=True), _passed_fraction(pairs, shown=False)


def _passed_fraction(pairs: Sequence[tuple[RepairCheck, Any]], *, shown: bool) -> float:
    of = [_is_equal_json(result, call.expected) for call, result in pairs if call.shown is shown]
    return sum(of) / len(of)


def _is_equal_json(result: Any, expected: Any) -> bool:
    """Equal as JSON, numbers up to rounding."""
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
    """What the program reports, and how it ended."""
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
    """The files of a report, which anybody may have written. Raises `ToolRefused` and what nonsense raises."""
    if files is None:
        return None
    read = {_check_path(path): base64.b64decode(content) for path, content in files.items()}
    _check_files(read)
    return read


def _check_files(files: Mapping[str, bytes]) -> None:
    if len(files) > _MAX_FILES or sum(map(len, files.values())) > _MAX_BYTES:
        raise ToolRefused(f"more than {_MAX_FILES} files or {_MAX_BYTES} bytes")
    for path in files:
        above = next((str(folder) for folder in PurePosixPath(path).parents if str(folder) in files), None)
        if above is not None:
            raise ToolRefused(f"{above} is a file, so there is no {path}")


def _check_path(path: str) -> str:
    place = PurePosixPath(path)
    short = len(path.encode(errors="replace")) <= 200
    if place.is_absolute() or ".." in place.parts or not place.parts or not path.isprintable() or not short:
        raise ToolRefused(f"{path[:200]!r} is no path inside the repository")
    return str(place)


_TASK = """You are repairing a small Python repository: some of its tests fail because of a mistake in the package.
Find and fix the mistake in the package; changing the tests does not help. Call `submit` when you are done."""


class RepairEnvironment:
    """One episode at a time; `data` is not used."""

    reusable = True

    def __init__(
        self, *, modules: int = 3, bugs: int = 1, max_steps: int = 20, timeout_s: float = 10.0, longest: int = 4000
    ) -> None:
        require_sandbox("repair")
        make_repository(0, modules=modules, bugs=bugs)  # says what is wrong with the sizes
        if max_steps < 2:
            raise ConfigError("nothing is repaired in fewer than 2 steps", key="max_steps", value=max_steps)
        self.max_steps = max_steps
        self._sizes = {"modules": modules, "bugs": bugs}
        self._timeout_s = timeout_s
        self._box = Toolbox([StaticToolSource(*self._tools())], longest=longest)
        self.instructions = f"{_TASK}\n\n{describe_tools(self._tools())}"

    async def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        await self._box.begin()
        self.repository: RepairRepository = make_repository(seed, **self._sizes)
        self.workspace = RepairWorkspace(self.repository.files, timeout_s=self._timeout_s)
        self._steps, self._submitted = 0, False
        listed = "\n".join(sorted(self.workspace.files))
        return f"The tests of this repository fail (`python3 -m unittest`). Repair it.\n\n{listed}"

    async def step(self, action: str) -> Reply:
        self._steps += 1
        said = parse_tool_calls(action)
        answers = await self._box.answer(said.calls) if said.calls else None
        valid = answers is not None and not answers.malformed
        text = answers.text if answers else "Call one of the tools; `submit` when the repository is repaired."
        if not self._submitted and self._steps < self.max_steps:
            return Reply(text, valid=valid)
        shown, hidden = await score_repository(self.repository, self.workspace.files, timeout_s=self._timeout_s)
        reward = float(shown == hidden == 1.0)
        info = {"shown": shown, "hidden": hidden, "submitted": self._submitted}
        return Reply(text, reward, done=True, valid=valid, success=reward == 1.0, info=info)

    def _tools(self) -> list[Tool]:
        async def shell(arguments: ToolArguments) -> str:
            return await self.workspace.run(arguments["command"])

        async def edit(arguments: ToolArguments) -> str:
            return self.workspace.edit(arguments["path"], arguments["old"], arguments["new"])

        async def write(arguments: ToolArguments) -> str:
            return self.workspace.write(arguments["path"], arguments["content"])

        async def submit(arguments: ToolArguments) -> str:
            if self._submitted:
                raise ToolRefused("submitted already")
            self._submitted = True
            return "Submitted."

        return [
            _make_tool("shell", "Run a command of sh in the repository's folder.", shell, "command"),
            _make_tool("edit", "Replace a text that a file has exactly once.", edit, "path", "old", "new"),
            _make_tool("write", "Write a whole file, new or not.", write, "path", "content"),
            _make_tool("submit", "The repository is repaired: end the task.", submit),
        ]


def _make_tool(name: str, description: str, call: Any, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return Tool(name=name, description=description, parameters=schema, call=call)
