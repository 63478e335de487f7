"""Runs a command and watches the memory of its whole tree of processes. Linux only.

PSS divides a page by the processes that map it, so weights in shared memory and libraries count once; the sum of RSS
counts them in every process. Looked at once a second: a peak shorter than that may be missed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command went."""

    code: int | None
    """Exit code; None: it took too long and was ended."""
    wall_s: float
    peak_pss_mb: float
    peak_rss_mb: float


def watch(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> Ran:
    """Run `command` to its end, its output into `log`; after `limit_s` it and its children are ended."""
    began, pss, rss = time.monotonic(), 0.0, 0.0
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(command, env=dict(environment), stdout=out, stderr=out, start_new_session=True)
        try:
            while (code := _wait(child)) is None and time.monotonic() - began < limit_s:
                now_pss, now_rss = tree_memory_mb(child.pid)
                pss, rss = max(pss, now_pss), max(rss, now_rss)
        finally:
            _end(child.pid)
            child.wait()
    return Ran(code=code, wall_s=time.monotonic() - began, peak_pss_mb=pss, peak_rss_mb=rss)


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return None


def _end(session: int) -> None:
    """What is left of the session that was started for the command."""
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return


def tree_memory_mb(root: int) -> tuple[float, float]:
    """PSS and RSS of a process and all that descend from it, now."""
    pss = rss = 0
    for process in _descendants(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:  # it has ended meanwhile
            continue
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
        pss, rss = pss + kilobytes.get("Pss", 0), rss + kilobytes.get("Rss", 0)
    return pss / 1024, rss / 1024


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            except OSError:
                continue
            children.setdefault(int(after_name.split()[1]), []).append(int(entry.name))
    waiting = [root]
    while waiting:
        process = waiting.pop()
        yield process
        waiting += children.get(process, [])
