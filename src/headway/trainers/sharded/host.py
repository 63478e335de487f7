"""The process's side of one rank: it meets the others, and is a trainer's host from then on.

`target` of a rank returns a `Rank`. Nothing of its trainer is made before all ranks are there, as the first thing that
a trainer does is done together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.trainers.base import Trainer
from headway.trainers.host import TrainerHost
from headway.trainers.sharded.meeting import Meeting


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Before it has met the others."""

    number: int
    ranks: int
    device: str
    make: Callable[[], Trainer]
    """Its trainer. Called when all are there."""


class RankHost:
    """`open` of rank 0, `meet` of all, then whatever a trainer is asked."""

    def __init__(self, rank: Rank, tell: Callable[[Any], None]) -> None:
        self._rank, self._tell = rank, tell
        self._meeting = Meeting(rank.number, rank.ranks)
        self._host: TrainerHost | None = None

    async def open(self, host: str) -> str:
        """The address to meet at, on this machine, which is `host` for the others."""
        return self._meeting.open(host)

    async def meet(self, address: str, host: str) -> None:
        """Returns when all are there and this one has its trainer. On a thread: whoever waits can be told to end."""
        trainer = await asyncio.to_thread(self._met, address, host)
        self._host = TrainerHost(trainer, self._tell)

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()

    def __getattr__(self, method: str) -> Any:
        return getattr(self._host, method)

    def _met(self, address: str, host: str) -> Trainer:
        self._meeting.join(address, host, self._rank.device)
        return self._rank.make()
