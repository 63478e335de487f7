"""How components of a run are started: all at once, each with a second try, and with word of those that are not up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headway.engines.base import Engine
from headway.errors import BackendError
from headway.trainers.base import Trainer


async def start_together(
    starts: Sequence[tuple[str, Awaitable[None]]], on_pending: Callable[[Sequence[str]], None]
) -> None:
    """Await named starts together and raise the first error; `on_pending` gets the names of those that are not up."""
    pending = [name for name, _ in starts]

    async def await_start(name: str, start: Awaitable[None]) -> None:
        await start
        pending.remove(name)
        on_pending(pending)

    on_pending(pending)
    outcomes = await asyncio.gather(*(await_start(*named) for named in starts), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def start_with_retry(backend: Engine | Trainer) -> None:
    """Start a back end; restart it once if its process was lost while it started.

    A `ConfigError` is no `BackendError`, so a process that rejects its arguments is not started again.
    """
    try:
        await backend.start()
    except BackendError:
        await backend.restart()
