"""Components start together; one that is killed while it starts is started again, one that refuses is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.errors import ConfigError, EngineCrashed, HeadwayError
from headway.launch.components import TrainingComponents


class FakeBackend:
    """As much of a back end as is needed to start it: `failures` are raised by one start after the other."""

    name = "engine/0"

    def __init__(self, *failures: HeadwayError) -> None:
        self._failures = list(failures)
        self.starts = 0

    async def start(self) -> None:
        self.starts += 1
        if self._failures:
            raise self._failures.pop(0)

    async def restart(self) -> None:
        await self.start()


def components(*parts: Any) -> TrainingComponents:
    trainer, *engines = parts
    return TrainingComponents(trainer=trainer, engines=engines, transport=None)  # type: ignore[arg-type]


def test_a_part_that_is_killed_while_it_starts_gets_another_try() -> None:
    trainer, engine = FakeBackend(), FakeBackend(EngineCrashed("engine/0 was killed by SIGKILL"))
    asyncio.run(components(trainer, engine).start())
    assert (trainer.starts, engine.starts) == (1, 2)


@pytest.mark.parametrize(
    ("failures", "starts"),
    [
        ([EngineCrashed("once"), EngineCrashed("twice")], 2),
        ([ConfigError("no room for a model", key="actor_infer", value=1)], 1),
    ],
)
def test_what_keeps_a_part_from_coming_up_is_raised(failures: list[HeadwayError], starts: int) -> None:
    engine, last = FakeBackend(*failures), failures[-1]
    with pytest.raises(type(last), match=str(last).split(":")[0]):
        asyncio.run(components(FakeBackend(), engine).start())
    assert engine.starts == starts
