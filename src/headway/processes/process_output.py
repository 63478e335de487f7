"""The output of a process: kept for the last lines of an error, appended to a log, or counted against a limit."""

import asyncio
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

_TAIL_BYTES, _TAIL_LINES = 4000, 12
_CAUSE = re.compile(rb"(?m)^(?:.*\] )?([\w.]*(?:Error|Exception): .+)$")
"""The last line of a traceback, also behind what a log puts before every line."""
_CRASH = "Fatal Python error"
_WINDOW_S, _QUIET_S = 10.0, 0.05
_MOST_CAUSES, _LONGEST_CAUSE, _CAUSE_BYTES = 3, 400, 1 << 18


class ProcessOutput(asyncio.Protocol):
    """The output of a process: its log, a file that goes with it, or a pipe that counts.

    With a `limit` the output is a pipe: it is read as it comes, `on_limit` is called once when more than `limit` bytes
    come in ten seconds, and only the end and the first `limit` bytes, in the log, are kept.
    """

    def __init__(self, log: Path | None = None, *, limit: int = 0, on_limit: Callable[[], None] = lambda: None) -> None:
        self.over_limit = False
        self._limit, self._on_limit = limit, on_limit
        self._tail, self._size, self._window_begin_s = b"", 0, 0.0
        self._transport: asyncio.BaseTransport | None = None
        self._log: IO[bytes] | None = None
        self._room_in_log = limit
        self._captured: bytearray | None = None
        self._arrived = asyncio.Event()
        self._file: IO[bytes]
        if limit:
            ours, theirs = os.pipe()
            os.set_blocking(ours, False)  # what is asked before `listen` must not wait for our own writing end
            self._ours, self._file = os.fdopen(ours, "rb", buffering=0), os.fdopen(theirs, "wb", buffering=0)
            self._log = None if log is None else open_output_file(log)
        else:
            self._file = open_output_file(log)

    def fileno(self) -> int:
        """Return the descriptor that the process writes to."""
        return self._file.fileno()

    async def listen(self) -> None:
        """Begin to read, once the process has its end. Does nothing for a file."""
        if self._limit:
            self._file.close()
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.connect_read_pipe(lambda: self, self._ours)

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._captured is not None:
            self._captured += data
            self._arrived.set()
        self._write_to_log(data)
        now = asyncio.get_running_loop().time()
        if now - self._window_begin_s > _WINDOW_S:
            self._size, self._window_begin_s = 0, now
        self._size += len(data)
        if self._size > self._limit and not self.over_limit:
            self.over_limit = True
            self._on_limit()

    def _write_to_log(self, data: bytes) -> None:
        if self._log is None:
            return
        kept = data[: self._room_in_log]
        self._room_in_log -= len(kept)
        with suppress(OSError):
            self._log.write(kept if kept == data else kept + b"\n(the rest is not kept)\n")
            self._log.flush()
        if kept != data:
            self._log.close()
            self._log = None

    async def read_next(self, within_s: float) -> str:
        """Return what the process writes from now on, until it is quiet for a moment. Returns nothing for a file."""
        self._captured = bytearray()
        wait_s = within_s
        with suppress(TimeoutError):
            while self._transport is not None:
                self._arrived.clear()
                async with asyncio.timeout(wait_s):
                    await self._arrived.wait()
                wait_s = _QUIET_S
        found, self._captured = bytes(self._captured), None
        return found.decode("utf-8", "replace")

    def read_last_lines(self) -> str:
        """Return the last lines for an error message, each on a line of its own."""
        if not self._limit:
            return read_last_lines(self._file)
        with suppress(OSError, ValueError):  # what was written and has not been read by the event loop yet
            for data in iter(lambda: os.read(self._ours.fileno(), 1 << 16), b""):
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return _format_lines(self._tail)

    def close(self) -> None:
        """Stop reading, and close the file. Idempotent."""
        if self._transport is not None:
            self._transport.close()
        elif self._limit:
            self._ours.close()
        if self._log is not None:
            self._log.close()
        self._file.close()


def open_output_file(log: Path | None) -> IO[bytes]:
    """Open the log of a process, or a file without a name that goes with the process."""
    if log is None:
        return tempfile.TemporaryFile()
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("a+b")


def read_last_lines(output: IO[bytes]) -> str:
    """Return the last lines of a file for an error message; nothing where the file cannot be read."""
    with suppress(OSError, ValueError):
        size = os.fstat(output.fileno()).st_size
        return _format_lines(os.pread(output.fileno(), _TAIL_BYTES, max(size - _TAIL_BYTES, 0)))
    return ""


def read_errors_and_last_lines(output: IO[bytes], begin: int = 0) -> str:
    """Return the first errors that are named in a file from `begin` on, and its last lines.

    A program of several processes ends with the words of the first, which only says that another has failed.
    """
    tail = read_last_lines(output)
    return "".join(f"\n  | {cause}\n  | …" for cause in _find_causes(output, begin) if cause not in tail) + tail


def _format_lines(data: bytes) -> str:
    lines = data.decode("utf-8", "replace").strip().splitlines()
    crash = max((number for number, line in enumerate(lines) if line.startswith(_CRASH)), default=None)
    # The stack of a crash begins with the innermost line; all other errors end with what matters.
    lines = lines[-_TAIL_LINES:] if crash is None else lines[crash:][:_TAIL_LINES]
    return "".join(f"\n  | {line}" for line in lines)


def _find_causes(output: IO[bytes], begin: int) -> list[str]:
    """Return the first errors that are named in the file, each once."""
    with suppress(OSError, ValueError):
        size = os.fstat(output.fileno()).st_size
        data = os.pread(output.fileno(), _CAUSE_BYTES, max(begin, size - _CAUSE_BYTES))
        found = (match[1][:_LONGEST_CAUSE].decode("utf-8", "replace").strip() for match in _CAUSE.finditer(data))
        return list(dict.fromkeys(found))[:_MOST_CAUSES]
    return []


def read_process_state(process: int) -> str:
    """Return in words why a process does not run, with a leading comma; an empty text if it runs or merely sleeps."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b") ")[2][:1].decode()
    except OSError:
        return ", which is gone"
    return {"T": ", which is stopped", "D": ", which waits for a disk", "Z": ", which has ended"}.get(state, "")
