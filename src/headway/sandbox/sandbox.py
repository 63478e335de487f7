"""Sandbox: runs untrusted programs.

Guarantees on a machine that passes the probe: a program has no network and sees no file of the host but the system's
programs and libraries (read-only), no other process, and no variable of the host. Processor time, memory, disk, number
of files, processes and output are limited. When `run` returns or is cancelled, no process of the program is left. On
any other machine every run is refused. Control groups are not needed.

The sandbox does not hide the kernel: it does not protect from kernel bugs that ordinary system calls reach.
"""

import asyncio
import json
import marshal
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.sandbox import probe as probing
from headway.sandbox.bubblewrap_command import SandboxLayout, find_hidden_folders, make_supervisor_request
from headway.sandbox.probe import SandboxProbe
from headway.sandbox.sandbox_limits import ProgramEnding, ProgramOutcome, SandboxBroken, SandboxLimits, SandboxRefused

_SUPERVISOR = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); from sandbox_supervisor import main; main()"
)
"""Importing it, instead of running the file, uses its compiled form and saves a third of its cost."""
_GRACE_S = 10.0
"""How much longer than the program its supervisor may take before it counts as failed."""
_PROBE_LIMITS = SandboxLimits(wall_s=20, memory_mb=256, disk_mb=1, processes=4)


class Sandbox:
    """Runs at most `concurrency` programs at a time; the others wait."""

    def __init__(
        self,
        *,
        concurrency: int | None = None,
        limits: SandboxLimits | None = None,
        python: str | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """`python`: interpreter inside (default: this one or the system's). `packages`: folders it may import from."""
        self.limits = limits or SandboxLimits()
        self.concurrency = concurrency or os.cpu_count() or 1
        self._packages = tuple(str(Path(path).resolve()) for path in packages)
        self._pythons = (python,) if python else (_find_base_python(), "/usr/bin/python3")
        self._slots = asyncio.Semaphore(self.concurrency)
        self._probe_lock = asyncio.Lock()
        self._probe: SandboxProbe | None = None
        self._layout: SandboxLayout | None = None
        self._uids = deque(probing.list_sandbox_uids())
        self._uids.rotate(os.getpid() * 31)  # so that several runs on one machine rarely share a user

    async def probe(self) -> SandboxProbe:
        """Return what this machine can enforce; it is checked once."""
        async with self._probe_lock:
            if self._probe is None:
                self._probe = await self._probe_machine()
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
        layout = await self._require_layout()
        files = {**(files or {}), "main.py": code}
        return await self._run(layout, [layout.python, "-s", "main.py", *arguments], stdin, files, limits)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramOutcome:
        """Run a program of the system. Raises `SandboxRefused` if the machine cannot enforce everything."""
        if isinstance(argv, str) or not argv:
            raise ConfigError("must be a list of words", key="argv", value=argv, hint="run_python runs code")
        return await self._run(await self._require_layout(), argv, stdin, files or {}, limits)

    async def _require_layout(self) -> SandboxLayout:
        found = await self.probe()
        if self._layout is None:
            raise SandboxRefused(f"untrusted code is refused on this machine: {found.reason}")
        return self._layout

    async def _run(
        self,
        layout: SandboxLayout,
        argv: Sequence[str],
        stdin: str | bytes,
        files: Mapping[str, str | bytes],
        limits: SandboxLimits | None,
    ) -> ProgramOutcome:
        limits = limits or self.limits
        content = {name: _to_bytes(text) for name, text in files.items()}
        async with self._slots:
            uid = self._uids.pop() if len(self._uids) > 1 else self._uids[0]
            try:
                request = make_supervisor_request(
                    layout, argv, stdin=_to_bytes(stdin), files=content, limits=limits, uid=uid
                )
                return _parse_report(await _supervise(request, limits.wall_s + _GRACE_S))
            finally:
                if uid not in self._uids:
                    self._uids.appendleft(uid)

    async def _probe_machine(self) -> SandboxProbe:
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
            prefixes = (*_find_prefix(python), *self._packages)
            layout = SandboxLayout(
                bwrap=bwrap,
                library=library,
                python=python,
                prefixes=prefixes,
                packages=self._packages,
                hidden=find_hidden_folders(_private_folders(), prefixes),
            )
            found = await self._test_inside(layout)
            if found.ok:
                self._layout = layout
                break
        return found

    async def _test_inside(self, layout: SandboxLayout) -> SandboxProbe:
        """Run the self test inside the sandbox."""
        visible = (*layout.prefixes, *layout.hidden, "/usr")
        paths = (*_private_folders(), "/etc/shadow", "/var", "/root/.ssh")
        hidden = [path for path in paths if not any(f"{one}/".startswith(f"{path.rstrip('/')}/") for one in visible)]
        argv = [layout.python, "-s", "main.py", *hidden]
        try:
            outcome = await self._run(layout, argv, b"", {"main.py": probing.SELF_TEST}, _PROBE_LIMITS)
        except SandboxBroken as error:
            return SandboxProbe(missing=(probing.explain_bwrap_failure(str(error)),), bwrap=layout.bwrap)
        if not outcome.ok:
            missing = f"{layout.python} does not run inside: {outcome.stderr.strip()[-400:] or outcome.ending}"
            return SandboxProbe(missing=(missing,), bwrap=layout.bwrap)
        checks: dict[str, bool] = json.loads(outcome.stdout)
        return SandboxProbe(
            enforced=tuple(name for name, held in checks.items() if held),
            missing=tuple(f"not enforced here: {name}" for name, held in checks.items() if not held),
            bwrap=layout.bwrap,
            python=layout.python,
        )


async def _supervise(request: dict[str, Any], limit_s: float) -> bytes:
    """Run the supervisor once and return its report. Afterwards it and the program are always gone."""
    process = await asyncio.create_subprocess_exec(
        *(_find_base_python(), "-I", "-S", "-c", _SUPERVISOR),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
        cwd="/",
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    payload = marshal.dumps(request)
    try:
        async with asyncio.timeout(limit_s):
            process.stdin.write(len(payload).to_bytes(8, "big") + payload)
            with suppress(ConnectionError):  # it died; its stderr tells why
                await process.stdin.drain()
            report, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
            await process.wait()
    except TimeoutError:
        raise SandboxBroken(f"no report from the supervisor after {limit_s} s") from None
    finally:
        process.stdin.close()  # tells the supervisor to stop
        if process.returncode is None:
            await _wait_or_kill(process)
    if not report:
        raise SandboxBroken(f"the supervisor failed: {errors.decode(errors='replace').strip()[-400:]}")
    return report


async def _wait_or_kill(process: asyncio.subprocess.Process) -> None:
    """Wait for a supervisor that was told to stop; kill it if it takes too long."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({waiting}, timeout=_GRACE_S)
    finally:
        if not waiting.done():
            process.kill()


def _parse_report(report: bytes) -> ProgramOutcome:
    header, _, rest = report.partition(b"\n")
    ready, limit, status, cpu_s, wall_s, out_bytes, err_bytes = header.decode().split()
    stdout = rest[: int(out_bytes)].decode(errors="replace")
    stderr = rest[int(out_bytes) :][: int(err_bytes)].decode(errors="replace")
    code, at_limit = int(status), limit != "-"
    if ready == "0" and not at_limit:
        raise SandboxBroken(stderr.strip()[-400:] or f"bubblewrap ended with {code} before the program started")
    signal = -code if code < 0 else code - 128 if code > 128 else None
    ending = ProgramEnding(limit) if at_limit else ProgramEnding.SIGNALLED if signal else ProgramEnding.EXITED
    return ProgramOutcome(
        ending=ending,
        exit_code=None if at_limit or signal else code,
        signal=9 if at_limit else signal,
        stdout=stdout,
        stderr=stderr,
        truncated=ending is ProgramEnding.OUTPUT,
        timed_out=ending is ProgramEnding.TIMEOUT,
        cpu_s=float(cpu_s),
        wall_s=float(wall_s),
    )


def _to_bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def _private_folders() -> tuple[str, ...]:
    """Return the folders that programs must not see: the working directory and the home."""
    return tuple({os.path.realpath(path) for path in (".", os.path.expanduser("~")) if path != "~"})  # noqa: PTH111


def _find_base_python() -> str:
    """Return the path of this interpreter without its virtual environment."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())


def _find_prefix(python: str) -> tuple[str, ...]:
    """Return the folder that an interpreter outside the system's folders needs."""
    path = str(Path(python).resolve())
    if path.startswith(("/usr/", "/bin/")):
        return ()
    return (sys.base_prefix,) if path == _find_base_python() else (str(Path(path).parents[1]),)
