"""What an engine needs of a vLLM in its own process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.errors import EngineError
from headway.types import FinishReason, SamplingParams
from headway.weights.base import Manifest


class CoreLost(EngineError):
    """There is no vLLM any more behind the one that we talk to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as vLLM gets it."""

    key: str
    """vLLM's name for it."""
    prompt: Sequence[int]
    count: int
    """Most tokens to make."""
    params: SamplingParams
    ends: Sequence[int]
    """Tokens that end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step adds to a request."""

    tokens: Sequence[int] = ()
    logps: Sequence[float] = ()
    finish: FinishReason | None = None
    labels: Sequence[str] = ()
    """With the last piece: of the weights that made any of its tokens, by vLLM's own books."""


Pieces = AsyncGenerator[Piece, None]
"""Until the piece that has a `finish`. Left before, the request is aborted. Raises `CoreLost`."""


class Core(Protocol):
    """One vLLM. Every call raises `CoreLost` where it is gone."""

    on_end: Callable[[str], None]
    """Called with how it ended, when it did so by itself."""

    async def add(self, asked: Asked) -> Pieces:
        """Begin a request; when this returns, `stop` ends it too. Raises `EngineError` where it is refused."""
        ...

    async def abort(self, key: str) -> None:
        """End one request: its pieces end with `ABORTED`. Unknown ones are ignored."""
        ...

    async def stop(self) -> None:
        """End all requests, each with the tokens that it has, and begin none before `go_on`."""
        ...

    async def hold(self) -> None:
        """Stop between two tokens and keep everything, also what is added now, for `go_on`."""
        ...

    async def go_on(self) -> None:
        """Work again."""
        ...

    async def load(self, manifest: Manifest, segment: str, label: str) -> None:
        """Compute with these weights from now on, with nothing cached from others. Nothing runs meanwhile."""
        ...

    async def close(self) -> None:
        """End it. Idempotent."""
        ...
