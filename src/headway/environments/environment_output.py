"""Discards what environments print, which would corrupt the live display of a run and may never end.

Inside `discard_output()` everything that Python code writes to the standard streams is counted and dropped, for that
task or thread only. Printing beyond the limit raises, so the episode is lost with a reason. C code that writes to the
file descriptors directly is still shown in this process; worker processes discard that too.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from headway.errors import EnvironmentFailed

MAX_PRINTED_CHARACTERS = 16 << 20
"""Characters that an episode may print."""


class OutputCounter:
    """Counts the characters that one environment has printed."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count
        if self.count > MAX_PRINTED_CHARACTERS:
            raise EnvironmentFailed(f"printed more than {MAX_PRINTED_CHARACTERS >> 20} MB")


_ACTIVE_COUNTER: ContextVar[OutputCounter | None] = ContextVar("printed", default=None)


@contextmanager
def discard_output(counter: OutputCounter) -> Iterator[None]:
    """Count what this task or thread prints instead of showing it."""
    token = _ACTIVE_COUNTER.set(counter)
    try:
        yield
    finally:
        _ACTIVE_COUNTER.reset(token)


class StandardStreamFilter:
    """Replaces stdout and stderr while environments run in this process, so that `discard_output` takes effect."""

    def __init__(self) -> None:
        self._streams = {name: _FilteredStream(getattr(sys, name)) for name in ("stdout", "stderr")}
        for name, stream in self._streams.items():
            setattr(sys, name, stream)

    def close(self) -> None:
        """Restore the original streams, unless other code has replaced them since."""
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.original)


class _FilteredStream:
    """Drops text written inside `discard_output` and passes everything else through."""

    def __init__(self, original: TextIO) -> None:
        self.original = original

    def write(self, text: str) -> int:
        counter = _ACTIVE_COUNTER.get()
        if counter is None:
            return self.original.write(text)
        counter.add(len(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)
