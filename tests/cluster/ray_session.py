"""One small Ray for all tests of a module, and a loop that outlives each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import ray

STORE_BYTES = 100 << 20
LIMIT_S = 60.0


@contextmanager
def small_ray(**options: Any) -> Iterator[None]:
    """Of this process alone."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
        **options,
    )
    try:
        yield
    finally:
        ray.shutdown()


def bounded(scenario: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario

    asyncio.run(within())
