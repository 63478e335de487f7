"""Lending the trainer's devices: engines on them work while training waits, and make way before it goes on.

Hangs on the lock of the trainer's devices. Before a training step their requests go on elsewhere with the tokens they
have; for the scoring of a group, which is short, they wait where they are. Weights reach these engines like all others,
also while they are away; one that is behind when it comes back works when it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.cluster.base import ResourceLock
from headway.rollout.hub import InferenceHub


class Lending:
    """What the trainer's lock calls when it is taken and when it is free. `on_change`: what is served may be another
    version than before."""

    def __init__(self, hub: InferenceHub, lock: ResourceLock, on_change: Callable[[], None]) -> None:
        self._hub, self._lock, self._on_change = hub, lock, on_change
        lock.on_busy, lock.on_free = self.take_back, self.lend

    async def take_back(self) -> None:
        """The devices are needed now, by whoever owns the lock."""
        keep = self._lock.owner != "train"
        lent = [replica for replica in self._hub.replicas if replica.lent]
        for replica in lent:
            self._hub.recall(replica)
        await asyncio.gather(*(self._hub.make_way(replica, keep=keep) for replica in lent))
        self._on_change()

    async def lend(self) -> None:
        """Nobody needs them."""
        lent = [replica for replica in self._hub.replicas if replica.lent]
        await asyncio.gather(*(self._hub.come_back(replica) for replica in lent))
        self._on_change()
