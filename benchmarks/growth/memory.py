"""Memory of processes, looked at from inside and from outside. Linux only.

`Watch` reads the kernel's own counters of this process every few milliseconds, so a peak is hardly missed. `processes`
reads PSS, which divides a page by the processes that map it: sums over a tree of processes count everything once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_S = 0.01
MB = 1e6


def own_mb(*, shared: bool) -> float:
    """Anonymous memory of this process, with that shared with others where it is its own."""
    fields = _fields(Path("/proc/self/status").read_text(encoding="ascii"))
    return (fields["RssAnon"] + (fields["RssShmem"] if shared else 0)) * 1024 / MB


def _fields(text: str) -> dict[str, int]:
    """Kilobytes by name."""
    split = (line.split() for line in text.splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) for parts in split if len(parts) == 3 and parts[2] == "kB"}


class Watch:
    """Inside the block, the largest amount of memory that this process has."""

    def __init__(self, *, shared: bool = False) -> None:
        self.peak_mb = 0.0
        self._shared = shared
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, own_mb(shared=self._shared))
            if self._ended.wait(LOOK_S):
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One process, from outside."""

    output: str
    """Name of the file that its output goes to."""
    own_mb: float
    """Anonymous memory."""
    shared_mb: float
    """Its part of memory that was made to be shared."""
    files_mb: float
    """Its part of programs and libraries."""


def processes(root: int) -> Iterator[Seen]:
    """A process and all that descend from it, now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            except OSError:  # it has ended meanwhile
                continue
            children.setdefault(int(after_name.split()[1]), []).append(int(entry.name))
    waiting = [root]
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        try:
            place = Path(f"/proc/{process}")
            fields = _fields((place / "smaps_rollup").read_text(encoding="ascii"))
            output = (place / "fd" / "1").readlink().stem
        except OSError:
            continue
        own, shared, files = (fields.get(f"Pss_{kind}", 0) * 1024 / MB for kind in ("Anon", "Shmem", "File"))
        yield Seen(output=output, own_mb=own, shared_mb=shared, files_mb=files)
