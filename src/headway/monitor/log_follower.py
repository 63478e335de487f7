"""Follows an event log while it is written, and knows all of it: by its index where there is one, by reading elsewhere.

    follower = LogFollower(Path("runs/one"))
    while follower.advance(): ...          # until all is read that is there; call it again for what is new

Guarantees: each event counts once, also when the newest stretch is moved and compressed meanwhile. What had to be read
gets an index beside the log, if the directory can be written, so that the next reader is quick. A log that was replaced
by another one is read from its beginning (`generation` tells). Nothing is kept for single events.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from headway.monitor.event_files import (
    HEAD_BYTES,
    LOG_FILE,
    STRETCHES,
    compute_head,
    count_bytes,
    find_stretch,
    list_stretches,
    read_part_index,
    write_part_index,
)
from headway.monitor.event_log import LoggedEvent, read_events
from headway.monitor.log_index import LogIndexer, PartSummary

_PART_BYTES = 9 << 19
"""A part of a large file ends with the first step after this many bytes: more than half of a stretch, which has two."""
_STEP_END = b',"step.end",'


class LogFollower:
    """Reads a log as far as it is written. It is used by one thread at a time."""

    def __init__(
        self,
        directory: Path,
        *,
        part_bytes: int = _PART_BYTES,
        on_event: Callable[[LoggedEvent], None] | None = None,
        on_index: Callable[[PartSummary], None] | None = None,
    ) -> None:
        """`on_event` is called with every event that is read, `on_index` with every part that was indexed before."""
        self._directory, self._part_bytes, self._on_event, self._on_index = directory, part_bytes, on_event, on_index
        self._plain, self._stretches = directory / LOG_FILE, directory / STRETCHES
        self.generation = 0
        """Grows when the log was replaced, and everything that was known is void."""
        self._reset()

    def _reset(self) -> None:
        self.parts: list[PartSummary] = []
        """Whole parts, oldest first."""
        self.indexer = LogIndexer()
        """Knows the part that is being written."""
        self.generation += 1
        self._begin_part(1, 0)
        self._file: IO[bytes] | None = None
        self._file_head = b""
        self._is_live = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def events(self) -> int:
        """Number of events known."""
        return sum(part.events for part in self.parts) + self.indexer.part.events

    @property
    def progress(self) -> float:
        """Share of the log that is known, between 0 and 1."""
        stretches = {number: count_bytes(path) for number, path in list_stretches(self._stretches).items()}
        with suppress(OSError):
            stretches[max(stretches, default=0) + 1] = self._plain.stat().st_size
        done = sum(size for number, size in stretches.items() if number < self._stretch) + self._offset
        return min(1.0, done / (sum(stretches.values()) or 1))

    def all_parts(self) -> list[PartSummary]:
        """Return every part, the one that is being written included."""
        newest = self.indexer.settle()
        newest.stretch, newest.begin = self._stretch, self._begin
        return [*self.parts, newest] if newest.events else list(self.parts)

    def advance(self, most_bytes: int = 1 << 20) -> bool:
        """Read on, a bounded piece. Return whether there is more that can be read at once."""
        if self._file is None:
            index = self._find_index()
            if index is not None:
                self._take(index)
                return True
            if not self._open():
                return False
        piece = self._read_piece(most_bytes)
        whole = piece.rfind(b"\n") + 1
        if whole:
            self._read_lines(piece[:whole])
            if self._is_live:
                assert self._file is not None
                self._file.seek(self._offset)
            return True
        return self._follow_file() if self._is_live else self._end_stretch(self._offset + len(piece))

    def _find_index(self) -> PartSummary | None:
        """Return the index of the next part if it belongs to the log that is there."""
        index = read_part_index(self._directory, self._stretch, self._begin)
        if index is None:
            return None
        stretch = find_stretch(self._stretches, self._stretch)
        if stretch is not None:
            size = count_bytes(stretch)
            return index if (index.end == size if index.is_last else index.end <= size) else None
        with suppress(OSError), self._plain.open("rb") as log:
            log.seek(index.begin)
            head = compute_head(log.read(min(HEAD_BYTES, index.end - index.begin)))
            if not index.is_last and head == index.head and index.end <= self._plain.stat().st_size:
                return index
        return None

    def _take(self, index: PartSummary) -> None:
        self.parts.append(index)
        if self._on_index is not None:
            self._on_index(index)
        self.indexer = LogIndexer.from_state(index.state)
        self._begin_part(*((self._stretch + 1, 0) if index.is_last else (self._stretch, index.end)))

    def _begin_part(self, stretch: int, begin: int) -> None:
        self._stretch, self._begin, self._offset, self._part_head = stretch, begin, begin, b""

    def _open(self) -> bool:
        """Open the stretch that comes next, or the file that is being written. Return whether there is one to read."""
        path = list_stretches(self._stretches).get(self._stretch)
        try:
            if path is not None:
                self._file = _open_stretch(path)
            else:
                self._file = self._plain.open("rb")
                if self._stretch in list_stretches(self._stretches):  # it was moved a moment ago
                    self.close()
                    return self._open()
                self._file_head = self._file.read(HEAD_BYTES)
            self._file.seek(self._begin)
        except (OSError, EOFError, zlib.error):
            self.close()
            return False
        self._is_live = path is None
        return True

    def _read_piece(self, most_bytes: int) -> bytes:
        assert self._file is not None
        try:
            piece = self._file.read(most_bytes)
            return piece if len(piece) < most_bytes or piece.endswith(b"\n") else piece + self._file.readline()
        except (OSError, EOFError, zlib.error):
            return b""  # a damaged stretch ends here

    def _read_lines(self, lines: bytes) -> None:
        """Read whole lines, and end the part after a step if it is large enough."""
        cut = 0
        if self._offset + len(lines) - self._begin >= self._part_bytes and (found := lines.rfind(_STEP_END)) >= 0:
            cut = lines.index(b"\n", found) + 1
            self._feed(lines[:cut])
            self._finish_part(is_last=False)
            self._begin_part(self._stretch, self._offset)
        self._feed(lines[cut:])

    def _feed(self, lines: bytes) -> None:
        if len(self._part_head) < HEAD_BYTES:
            self._part_head += lines[: HEAD_BYTES - len(self._part_head)]
        # Lines end with a line feed alone: other separators of Unicode are part of a text.
        for logged in read_events(lines.decode("utf-8", "replace").split("\n")[:-1]):
            self.indexer(logged)
            if self._on_event is not None:
                self._on_event(logged)
        self._offset += len(lines)

    def _finish_part(self, *, is_last: bool) -> None:
        part = self.indexer.finish(stretch=self._stretch, begin=self._begin, end=self._offset, is_last=is_last)
        part.head = compute_head(self._part_head)
        self.parts.append(part)
        write_part_index(self._directory, part)

    def _end_stretch(self, end: int) -> bool:
        """End a stretch that is not written to any more, with what is left of a torn line."""
        self._offset = end
        self.close()
        self._finish_part(is_last=True)
        self._begin_part(self._stretch + 1, 0)
        return True

    def _follow_file(self) -> bool:
        """Find out at the end of the file that is written to whether it was moved or replaced."""
        assert self._file is not None
        handle = self._file.fileno()
        status = os.fstat(handle)
        if status.st_size < self._offset or os.pread(handle, len(self._file_head), 0) != self._file_head:
            self.close()
            self._reset()
            return True
        try:
            if self._plain.stat().st_ino == status.st_ino:
                return False
        except OSError:
            if self._stretch not in list_stretches(self._stretches):
                return False  # it was deleted, or is being moved
        if self._stretch not in list_stretches(self._stretches):
            self.close()
            self._reset()
            return True
        self._is_live = False  # nobody writes to it any more: the rest is read, then the stretch ends
        return True


def _open_stretch(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(path)) if path.suffix == ".gz" else path.open("rb")


def read_part_events(directory: Path, part: PartSummary) -> Iterator[LoggedEvent]:
    """Yield the events of one part; none if it cannot be read any more."""
    path = list_stretches(directory / STRETCHES).get(part.stretch, directory / LOG_FILE)
    with suppress(OSError, EOFError, zlib.error), _open_stretch(path) as log:
        log.seek(part.begin)
        # The part that is being written has no end yet.
        lines = log.read(part.end - part.begin if part.end else -1).decode("utf-8", "replace").split("\n")[:-1]
        yield from read_events(lines)
