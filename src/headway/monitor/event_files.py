"""The event log on disk: the newest stretch in `events.jsonl`, all older ones compressed in `events/`.

The log is written to `events.jsonl`, so `tail -f` shows what happens now. Once that file is larger than an eighth of
the log so far, it becomes `events/000001.jsonl` and so on, and is compressed to `.jsonl.gz` by a thread. The last
stretch is compressed when the run ends. A process that is killed in between leaves whole lines in one place or the
other: a stretch is moved by renaming it, and its plain form is deleted only after the compressed one is complete.
`event_index/` has the index of each stretch (`log_index`), with which a long log is opened without reading it.

    for logged in read_event_log(Path("runs/one")): ...
"""

import gzip
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from errno import ENOENT
from pathlib import Path
from typing import IO

from headway.monitor.event_log import JsonlSink, LoggedEvent, read_events
from headway.monitor.log_index import LogIndexer, PartSummary

LOG_FILE = "events.jsonl"
STRETCHES = "events"
_INDEX = "event_index"
HEAD_BYTES = 256
_STRETCH_NAME = re.compile(r"(\d{6,})\.jsonl(\.gz)?")
_SMALLEST_STRETCH, _LARGEST_STRETCH = 1 << 16, 1 << 23
"""Bytes of a stretch. The largest is read in half a second."""
_STRETCHES_PER_LOG = 8
"""The plain file holds at most this fraction of the log, so compression pays off from the first steps on."""


class EventFileWriter:
    """Writes the event log of a run, and calls `on_failure` with the reason once it cannot be written.

    The file is flushed with every step: a killed process loses at most the events of the step under way.
    """

    def __init__(self, directory: Path, *, on_failure: Callable[[str], None]) -> None:
        self._path, self._stretches = directory / LOG_FILE, directory / STRETCHES
        self._on_failure, self._failed = on_failure, False
        self._packed_bytes = sum(count_bytes(path) for path in list_stretches(self._stretches).values())
        self._packing: threading.Thread | None = None
        self._indexer = LogIndexer()
        self._open()

    def __enter__(self) -> "EventFileWriter":
        # What a killed process left becomes a stretch of its own, so that the index of the next one is whole.
        self._attempt(self._rotate)
        return self

    def __exit__(self, *exception: object) -> None:
        self._attempt(self._rotate)
        self._attempt(self._file.close)
        if self._packing is not None:
            self._packing.join()
        if not self._failed and self._path.exists() and not self._path.stat().st_size:
            self._path.unlink()

    def __call__(self, event: LoggedEvent) -> None:
        if self._failed:
            return
        self._attempt(lambda: self._sink(event))
        self._indexer(event)
        if event.kind == "step.end" and self._file.tell() >= self._stretch_limit:
            self._attempt(self._rotate)

    @property
    def _stretch_limit(self) -> int:
        return min(max(self._packed_bytes // _STRETCHES_PER_LOG, _SMALLEST_STRETCH), _LARGEST_STRETCH)

    def _open(self) -> None:
        self._file: IO[str] = self._path.open("a", encoding="utf-8", newline="\n")
        self._sink = JsonlSink(self._file)

    def _rotate(self) -> None:
        """Move the lines so far to a stretch of their own, compress it in the background, and begin a new file."""
        self._file.close()
        size, index = self._path.stat().st_size, None
        if size:
            self._stretches.mkdir(exist_ok=True)
            number = max(list_stretches(self._stretches), default=0) + 1
            if self._indexer.part.events:
                index = self._indexer.finish(stretch=number, begin=0, end=size, is_last=True)
                index.head = compute_head(_read_head(self._path))
            self._path.rename(self._stretches / f"{number:06d}.jsonl")
            self._packed_bytes += size
        self._open()
        self._pack_in_background(index)

    def flush(self) -> None:
        """Write what is buffered, so that others see it."""
        self._attempt(self._file.flush)

    def _pack_in_background(self, index: PartSummary | None = None) -> None:
        if self._packing is not None:
            self._packing.join()
        self._packing = threading.Thread(target=_pack_stretches, args=(self._stretches, index), name="pack-events")
        self._packing.start()

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._on_failure(f"the event log cannot be written: {error.strerror}")


def read_event_log(path: Path) -> Iterator[LoggedEvent]:
    """Yield the events of a run's directory, or of an event log alone. Raises `FileNotFoundError` if there is none."""
    return read_events(read_event_lines(path))


def read_event_lines(path: Path) -> Iterator[str]:
    """Yield the lines of the log, oldest first, also while a run writes to it. Raises `FileNotFoundError`.

    A compressed stretch that is damaged yields the whole lines before the damage, and a line that says so.
    """
    plain = path / LOG_FILE if path.is_dir() else path
    directory = plain.parent / STRETCHES if plain.name == LOG_FILE else None
    done = 0
    while True:
        for number, stretch in list_stretches(directory).items():
            if number > done:
                yield from _read_lines(stretch)
                done = number
        with ExitStack() as stack:
            try:
                newest = stack.enter_context(plain.open(encoding="utf-8", errors="replace"))
            except FileNotFoundError:
                newest = None
            if max(list_stretches(directory), default=0) > done:
                continue  # the file has become a stretch that has not been read
            if newest is not None:
                yield from newest
            elif not done:
                raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(plain))
            return


def read_last_event_s(directory: Path) -> float:
    """Return the time of the last event of a run, 0 if there is none. Only the newest stretch is read."""
    newest = [directory / LOG_FILE, *reversed(list_stretches(directory / STRETCHES).values())]
    for path in newest:
        last_s = max((event.time_s for event in read_events(_read_lines(path))), default=None)
        if last_s is not None:
            return last_s
    return 0.0


def last_written_s(path: Path) -> float:
    """Return when the log was last written to, as seconds since the epoch."""
    plain = path / LOG_FILE if path.is_dir() else path
    files = [plain, *list_stretches(plain.parent / STRETCHES).values()]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def list_stretches(directory: Path | None) -> dict[int, Path]:
    """Return the older stretches by number, in order; the compressed form of one that is being compressed.

    A listing may miss a stretch that changes its form meanwhile, so there are two: it does so only once.
    """
    found = dict[int, Path]()
    for _ in range(2):
        with suppress(OSError):
            for path in sorted(directory.iterdir() if directory is not None else ()):
                if name := _STRETCH_NAME.fullmatch(path.name):
                    found[int(name[1])] = path  # ".jsonl.gz" sorts after ".jsonl"
    return dict(sorted(found.items()))


def find_stretch(directory: Path, number: int) -> Path | None:
    """Return an older stretch; the compressed form of one that is being compressed."""
    paths = (directory / f"{number:06d}.jsonl{suffix}" for suffix in (".gz", ""))
    return next((path for path in paths if path.exists()), None)


def _read_lines(path: Path) -> Iterator[str]:
    """Yield the whole lines of a plain or compressed file as far as it can be read."""
    if path.suffix != ".gz" and not path.exists():
        path = path.with_name(path.name + ".gz")  # it was compressed a moment ago
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", errors="replace")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8", errors="replace") as lines
        ):
            for line in lines:
                if line.endswith("\n"):
                    yield line
    except FileNotFoundError:
        return
    except (OSError, EOFError, zlib.error) as error:
        yield f"{path.name} is damaged: {error}\n"


def _pack_stretches(directory: Path, index: PartSummary | None) -> None:
    """Write the index, and compress every stretch that is not compressed yet, where there is space for it."""
    if index is not None:
        write_part_index(directory.parent, index)
    for path in list_stretches(directory).values():
        packed, partial = path.with_name(path.name + ".gz"), path.with_name(path.name + ".part")
        with suppress(OSError):
            if path.suffix != ".gz":
                with path.open("rb") as plain, gzip.open(partial, "wb", compresslevel=6) as compressed:
                    shutil.copyfileobj(plain, compressed, 1 << 20)
                partial.replace(packed)
            packed_from = path.with_suffix("") if path.suffix == ".gz" else path
            packed_from.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)


def compute_head(first_bytes: bytes) -> int:
    """Return the checksum by which an index knows its part of the log."""
    return zlib.crc32(first_bytes[:HEAD_BYTES])


def _read_head(path: Path) -> bytes:
    with path.open("rb") as log:
        return log.read(HEAD_BYTES)


def write_part_index(directory: Path, index: PartSummary) -> None:
    """Write the index of a part of a run's log, whole or not at all."""
    path = _name_index(directory, index.stretch, index.begin)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    with suppress(OSError):  # an index can be made again at any time
        path.parent.mkdir(exist_ok=True)
        body = json.dumps(index.to_json(), separators=(",", ":"), ensure_ascii=False)
        partial.write_bytes(zlib.compress(body.encode("utf-8", "surrogatepass"), 6))
        partial.replace(path)


def read_part_index(directory: Path, stretch: int, begin: int) -> PartSummary | None:
    """Return the index of the part that begins at a byte of a stretch, or None if there is none that can be read."""
    try:
        body = zlib.decompress(_name_index(directory, stretch, begin).read_bytes())
        return PartSummary.from_json(json.loads(body))
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        return None


def _name_index(directory: Path, stretch: int, begin: int) -> Path:
    return directory / _INDEX / f"{stretch:06d}-{begin:012d}.index"


def count_bytes(stretch: Path) -> int:
    """Return the size of a stretch without compression, which its last four bytes tell."""
    with suppress(OSError), stretch.open("rb") as packed:
        if stretch.suffix != ".gz":
            return stretch.stat().st_size
        packed.seek(-4, os.SEEK_END)
        return int.from_bytes(packed.read(4), "little")
    return 0
