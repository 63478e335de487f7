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

from headway.environments.library.repair_bugs import Call, Repository
from headway.environments.tools.base import ToolRefused
from headway.environments.tools.python import shared_sandbox
from headway.errors import EnvironmentFailed
from headway.sandbox import Limits, SandboxBroken, SandboxRefused

_MOST_FILES, _MOST_BYTES = 150, 1 << 20
_LIMITS = Limits(memory_mb=512, disk_mb=16, output_kb=4096)
_GRACE_S = 5.0

_RUN = """
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

_JUDGE = """
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


class Workspace:
    """The files of one episode."""

    def __init__(self, files: Mapping[str, str], *, timeout_s: float) -> None:
        self.files: dict[str, bytes] = {path: text.encode() for path, text in files.items()}
        self._timeout_s = timeout_s

    async def run(self, command: str) -> str:
        """What a command says. Raises `ToolRefused` where it took too much."""
        limits = [str(self._timeout_s), str(_MOST_FILES), str(_MOST_BYTES)]
        stdin = command.encode(errors="replace").decode()
        stdout, ending = await _sandboxed(_RUN, self.files, self._timeout_s, arguments=limits, stdin=stdin)
        try:
            report = json.loads(stdout)
            said = base64.b64decode(report["said"]).decode(errors="replace").rstrip()
            ended, files = report["exit"], _read(report["files"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ToolRefused(f"the command broke off ({ending}); the files are as they were") from None
        notes = [said] if said else []
        if ended is None:
            notes.append(f"[ended after {self._timeout_s:g} s]")
        elif ended != 0:
            notes.append(f"[exit code {ended}]")
        if files is None:
            notes.append(f"[more than {_MOST_FILES} files or {_MOST_BYTES} bytes; the files are as they were]")
        else:
            self.files = files
        return "\n".join(notes) or "[no output]"

    def edit(self, path: str, old: str, new: str) -> str:
        """Raises `ToolRefused` where the file does not have `old` exactly once."""
        name = _inside(path)
        if name not in self.files:
            raise ToolRefused(f"there is no file {path}")
        text = self.files[name].decode(errors="replace")
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolRefused(f"{path} has that text {count} times, not once")
        return self.write(path, text.replace(old, new))

    def write(self, path: str, content: str) -> str:
        name = _inside(path)
        files = {**self.files, name: content.encode(errors="replace")}
        _check(files)
        self.files = files
        return f"Wrote {name}."


async def passed(repository: Repository, files: Mapping[str, bytes], *, timeout_s: float) -> tuple[float, float]:
    """Shares of the shown and of the hidden calls that the package answers rightly."""
    package = {path: content for path, content in files.items() if path.startswith(f"{repository.package}/")}
    asked = [[f"{repository.package}.{call.module}", call.function, list(call.arguments)] for call in repository.calls]
    stdout, _ = await _sandboxed(_JUDGE, package, timeout_s, stdin=json.dumps(asked))
    try:
        results = json.loads(stdout)
    except (ValueError, RecursionError):
        results = []
    if not isinstance(results, list) or len(results) != len(asked):
        return 0.0, 0.0
    pairs = list(zip(repository.calls, results, strict=True))
    return _share(pairs, shown=True), _share(pairs, shown=False)


def _share(pairs: Sequence[tuple[Call, Any]], *, shown: bool) -> float:
    of = [_same(result, call.expected) for call, result in pairs if call.shown is shown]
    return sum(of) / len(of)


def _same(result: Any, expected: Any) -> bool:
    """Equal as JSON, numbers up to rounding."""
    if isinstance(expected, bool) or isinstance(result, bool):
        return result is expected
    if isinstance(expected, int | float) and isinstance(result, int | float):
        return math.isclose(result, expected, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(expected, list | tuple) and isinstance(result, list):
        return len(result) == len(expected) and all(map(_same, result, expected))
    if isinstance(expected, dict) and isinstance(result, dict):
        return result.keys() == expected.keys() and all(_same(result[key], expected[key]) for key in expected)
    return type(result) is type(expected) and bool(result == expected)


async def _sandboxed(
    code: str, files: Mapping[str, bytes], timeout_s: float, *, arguments: Sequence[str] = (), stdin: str = ""
) -> tuple[str, str]:
    """What the program reports, and how it ended."""
    limits = replace(_LIMITS, wall_s=timeout_s + _GRACE_S, cpu_s=int(timeout_s + _GRACE_S) + 1)
    inside = {f"repository/{path}": content for path, content in files.items()}
    try:
        outcome = await shared_sandbox().run_python(code, arguments=arguments, stdin=stdin, files=inside, limits=limits)
    except (SandboxRefused, SandboxBroken) as error:
        raise EnvironmentFailed(f"repair: {error}") from error
    return outcome.stdout, str(outcome.ending)


def _read(files: Any) -> dict[str, bytes] | None:
    """The files of a report, which anybody may have written. Raises `ToolRefused` and what nonsense raises."""
    if files is None:
        return None
    read = {_inside(path): base64.b64decode(content) for path, content in files.items()}
    _check(read)
    return read


def _check(files: Mapping[str, bytes]) -> None:
    if len(files) > _MOST_FILES or sum(map(len, files.values())) > _MOST_BYTES:
        raise ToolRefused(f"more than {_MOST_FILES} files or {_MOST_BYTES} bytes")
    for path in files:
        above = next((str(folder) for folder in PurePosixPath(path).parents if str(folder) in files), None)
        if above is not None:
            raise ToolRefused(f"{above} is a file, so there is no {path}")


def _inside(path: str) -> str:
    place = PurePosixPath(path)
    short = len(path.encode(errors="replace")) <= 200
    if place.is_absolute() or ".." in place.parts or not place.parts or not path.isprintable() or not short:
        raise ToolRefused(f"{path[:200]!r} is no path inside the repository")
    return str(place)
