"""A real environment that answers slowly: every step takes a random time, and some never return."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Any

from headway.environments.environment_registry import make_environment
from headway.environments.text_environment import (
    EnvironmentTraits,
    Reply,
    TextEnvironment,
    check_reply,
    read_traits,
)
from headway.seeding import make_rng

_NUMBERS = count()


class DelayedEnvironment:
    """Wraps an `env_type`; its steps take N(`mean_s`, `std_s`) seconds, and at least 0.

    The coroutine sleeps, as if for an answer over the network. The step itself runs on the event loop and must be
    short. Each object has a random stream of its own, from the seed and the number of objects made before it.
    """

    def __init__(
        self,
        *,
        mean_s: float,
        std_s: float,
        hang: float = 0.0,
        seed: int = 0,
        env_type: str = "frozen_lake",
        env_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._inner: TextEnvironment = make_environment(env_type, **dict(env_config or {}))
        self._mean_s, self._std_s, self._hang = mean_s, std_s, hang
        self._rng = make_rng(seed, "delayed", next(_NUMBERS))
        traits = read_traits(self._inner)
        for name in EnvironmentTraits.__slots__:
            setattr(self, name, getattr(traits, name))

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply:
        return check_reply(self._inner.reset(seed, data), started=False)

    async def step(self, action: str) -> Reply:
        await asyncio.sleep(max(0.0, self._rng.gauss(self._mean_s, self._std_s)))
        if self._hang and self._rng.random() < self._hang:
            await asyncio.get_running_loop().create_future()
        return check_reply(self._inner.step(action), started=True)
