"""What environments print is not shown: it would tear up the display of a run, and some print for ever.

Inside `discard_output()` whatever Python code writes to the standard streams is counted and dropped, for that task or thread
alone; beyond the limit, printing raises, and the episode is lost with a reason. C code that writes to the descriptors
themselves is heard in this process; in worker processes it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from headway.errors import EnvironmentFailed

MAX_PRINTED_CHARACTERS = 16 << 20
"""Characters that an episode may print."""


class OutputCounter:
    """How much one environment has printed."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count
        if self.count > MAX_PRINTED_CHARACTERS:
            raise EnvironmentFailed(f"printed more than {MAX_PRINTED_CHARACTERS >> 20} MB")


_ACTIVE_COUNTER: ContextVar[OutputCounter | None] = ContextVar("printed", default=None)


@contextmanager
def discard_output(printed: OutputCounter) -> Iterator[None]:
    """Have what this task or thread prints counted instead of shown."""
    token = _ACTIVE_COUNTER.set(printed)
    try:
        yield
    finally:
        _ACTIVE_COUNTER.reset(token)


class StandardStreamFilter:
    """Stands in for the standard streams while environments are played here."""

    def __init__(self) -> None:
        self._streams = {name: _FilteredStream(getattr(sys, name)) for name in ("stdout", "stderr")}
        for name, stream in self._streams.items():
            setattr(sys, name, stream)

    def close(self) -> None:
        """Put the streams back, unless somebody else has replaced them since."""
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.behind)


class _FilteredStream:
    """A stream that listens to some and passes the others through."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        printed = _ACTIVE_COUNTER.get()
        if printed is None:
            return self.behind.write(text)
        printed.add(len(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)
