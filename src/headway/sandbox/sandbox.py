"""Sandbox: runs code that nobody has read.

Guarantees, on a machine that the probe has passed: no network, no file of the host but the system's programs and
libraries (read-only), no other process to see or signal, no variable of ours; processor time, memory, disk, number
of files, processes and output bounded; when `run` returns or is cancelled, no process of the program is left. On
any other machine every run is refused. Control groups are not needed.

Does not hide the kernel: a bug in it that ordinary system calls reach is not kept out.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.sandbox import probe as probing
from headway.sandbox.bubblewrap_command import SandboxLayout, find_hidden_folders, make_supervisor_request
from headway.sandbox.probe import SandboxProbe
from headway.sandbox.sandbox_limits import (
    ProgramEnding,
    ProgramOutcome,
    SandboxBroken,
    SandboxLimits,
    SandboxRefused,
)

_SUPERVISOR = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); from sandbox_supervisor import main; main()"
)
"""Imported rather than run as a file: that keeps its compiled form, and a third of its cost."""
_GRACE_S = 10.0
"""How much longer than the program its supervisor may take before it is given up."""
_PROBE_LIMITS = SandboxLimits(wall_s=20, memory_mb=256, disk_mb=1, processes=4)


class Sandbox:
    """Runs programs side by side, at most `concurrency` at a time; the others wait their turn."""

    def __init__(
        self,
        *,
        concurrency: int | None = None,
        limits: SandboxLimits | None = None,
        python: str | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """`python`: interpreter inside; default ours, else the system's. `packages`: folders it may import from."""
        self.limits = limits or SandboxLimits()
        self.concurrency = concurrency or os.cpu_count() or 1
        self._packages = tuple(str(Path(path).resolve()) for path in packages)
        self._pythons = (python,) if python else (_own_python(), "/usr/bin/python3")
        self._turns = asyncio.Semaphore(self.concurrency)
        self._probing = asyncio.Lock()
        self._uids = list(probing.list_sandbox_uids())
        self._probe: SandboxProbe | None = None
        self._jail: SandboxLayout | None = None
        rotation = os.getpid() * 31 % len(self._uids)  # several runs of Headway on one machine rarely share a user
        self._uids = self._uids[rotation:] + self._uids[:rotation]

    async def probe(self) -> SandboxProbe:
        """What this machine can enforce, found out once."""
        async with self._probing:
            if self._probe is None:
                self._probe = await self._find_out()
        return self._probe

    async def run_python(
        self,
        code: str,
        *,
        arguments: Sequence[str] = (),
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramOutcome:
        """Run `code` as `main.py`; `files` lie beside it and can be imported."""
        jail = await self._ready()
        files = {**(files or {}), "main.py": code}
        return await self._run(jail, [jail.python, "-s", "main.py", *arguments], stdin, files, limits)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramOutcome:
        """Run a program of the system. Raises `SandboxRefused` where not everything can be enforced."""
        if isinstance(argv, str) or not argv:
            raise ConfigError("must be a list of words", key="argv", value=argv, hint="run_python runs code")
        return await self._run(await self._ready(), argv, stdin, files or {}, limits)

    async def _ready(self) -> SandboxLayout:
        found = await self.probe()
        if self._jail is None:
            raise SandboxRefused(f"untrusted code is refused on this machine: {found.reason}")
        return self._jail

    async def _run(
        self,
        jail: SandboxLayout,
        argv: Sequence[str],
        stdin: str | bytes,
        files: Mapping[str, str | bytes],
        limits: SandboxLimits | None,
    ) -> ProgramOutcome:
        limits = limits or self.limits
        content = {name: _bytes(text) for name, text in files.items()}
        async with self._turns:
            uid = self._uids.pop() if len(self._uids) > 1 else self._uids[0]
            try:
                asked = make_supervisor_request(jail, argv, stdin=_bytes(stdin), files=content, limits=limits, uid=uid)
                return _outcome(await _supervise(asked, limits.wall_s + _GRACE_S))
            finally:
                if uid not in self._uids:
                    self._uids.insert(0, uid)

    async def _find_out(self) -> SandboxProbe:
        problem = probing.find_system_problem()
        if problem:
            return SandboxProbe(missing=(problem,))
        bwrap, problem = probing.find_bwrap()
        if bwrap is None:
            return SandboxProbe(missing=(problem,))
        problem = await asyncio.to_thread(probing.find_bwrap_problem, bwrap)
        if problem:
            return SandboxProbe(missing=(problem,), bwrap=bwrap)
        library = probing.find_bwrap_libraries(bwrap) if os.geteuid() == 0 else None
        found = SandboxProbe(missing=("no Python interpreter to run inside",), bwrap=bwrap)
        for python in filter(os.path.exists, self._pythons):
            jail = SandboxLayout(
                bwrap=bwrap,
                library=library,
                python=python,
                prefixes=(*_prefix(python), *self._packages),
                packages=self._packages,
                hidden=find_hidden_folders(_own_folders()),
            )
            found = await self._try_out(jail)
            if found.ok:
                self._jail = jail
                break
        return found

    async def _try_out(self, jail: SandboxLayout) -> SandboxProbe:
        """Run the self test inside."""
        visible = (*jail.prefixes, *jail.hidden, "/usr")
        paths = (*_own_folders(), "/etc/shadow", "/var", "/root/.ssh")
        hidden = [path for path in paths if not any(f"{own}/".startswith(f"{path.rstrip('/')}/") for own in visible)]
        argv = [jail.python, "-s", "main.py", *hidden]
        try:
            outcome = await self._run(jail, argv, b"", {"main.py": probing.SELF_TEST}, _PROBE_LIMITS)
        except SandboxBroken as error:
            return SandboxProbe(missing=(probing.explain_bwrap_failure(str(error)),), bwrap=jail.bwrap)
        if not outcome.ok:
            missing = f"{jail.python} does not run inside: {outcome.stderr.strip()[-400:] or outcome.ending}"
            return SandboxProbe(missing=(missing,), bwrap=jail.bwrap)
        checks: dict[str, bool] = json.loads(outcome.stdout)
        return SandboxProbe(
            enforced=tuple(name for name, held in checks.items() if held),
            missing=tuple(f"not enforced here: {name}" for name, held in checks.items() if not held),
            bwrap=jail.bwrap,
            python=jail.python,
        )


async def _supervise(asked: dict[str, Any], limit_s: float) -> bytes:
    """One run of the supervisor. Whatever happens here, it is gone afterwards, and the program with it."""
    process = await asyncio.create_subprocess_exec(
        *(_own_python(), "-I", "-S", "-c", _SUPERVISOR),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
        cwd="/",
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    payload = marshal.dumps(asked)
    try:
        async with asyncio.timeout(limit_s):
            process.stdin.write(len(payload).to_bytes(8, "big") + payload)
            with suppress(ConnectionError):  # it died of something, which it says below
                await process.stdin.drain()
            report, complaint = await asyncio.gather(process.stdout.read(), process.stderr.read())
            await process.wait()
    except TimeoutError:
        raise SandboxBroken(f"no report from the supervisor after {limit_s} s") from None
    finally:
        process.stdin.close()  # means: stop
        if process.returncode is None:
            await _gone(process)
    if not report:
        raise SandboxBroken(f"the supervisor failed: {complaint.decode(errors='replace').strip()[-400:]}")
    return report


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a supervisor that was told to stop; kill it when it takes too long."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({waiting}, timeout=_GRACE_S)
    finally:
        if not waiting.done():
            process.kill()


def _outcome(report: bytes) -> ProgramOutcome:
    words, _, rest = report.partition(b"\n")
    ready, cut, status, cpu_s, wall_s, out_bytes, err_bytes = words.decode().split()
    stdout = rest[: int(out_bytes)].decode(errors="replace")
    stderr = rest[int(out_bytes) :][: int(err_bytes)].decode(errors="replace")
    code, was_cut = int(status), cut != "-"
    if ready == "0" and not was_cut:
        raise SandboxBroken(stderr.strip()[-400:] or f"bubblewrap ended with {code} before the program started")
    signal = -code if code < 0 else code - 128 if code > 128 else None
    ending = ProgramEnding(cut) if was_cut else ProgramEnding.SIGNALLED if signal else ProgramEnding.EXITED
    return ProgramOutcome(
        ending=ending,
        exit_code=None if was_cut or signal else code,
        signal=9 if was_cut else signal,
        stdout=stdout,
        stderr=stderr,
        truncated=ending is ProgramEnding.OUTPUT,
        timed_out=ending is ProgramEnding.TIMEOUT,
        cpu_s=float(cpu_s),
        wall_s=float(wall_s),
    )


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def _own_folders() -> tuple[str, ...]:
    """What is ours and no program's business: the working directory and the home."""
    return tuple({os.path.realpath(path) for path in (".", os.path.expanduser("~")) if path != "~"})  # noqa: PTH111


def _own_python() -> str:
    """Our interpreter without its virtual environment."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())


def _prefix(python: str) -> tuple[str, ...]:
    """The folder that an interpreter outside the system's own folders needs to see."""
    path = str(Path(python).resolve())
    if path.startswith(("/usr/", "/bin/")):
        return ()
    return (sys.base_prefix,) if path == _own_python() else (str(Path(path).parents[1]),)
