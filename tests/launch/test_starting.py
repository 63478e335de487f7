"""Components start together; one that is killed while it starts is started again, one that refuses is not."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from headway.errors import ConfigError, EngineCrashed, HeadwayError
from headway.launch.components import TrainingComponents
from headway.launch.training_session import _InterruptHandler


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


def test_after_a_run_signals_do_again_what_they_did_before_it() -> None:
    """With the defaults a SIGTERM that comes while the report is written would end the process without a word."""

    async def main() -> None:
        with _InterruptHandler(lambda name, is_clean: None):
            assert signal.getsignal(signal.SIGTERM) is not ours

    def ours(number: int, frame: object) -> None:
        pass

    earlier, interrupt = signal.signal(signal.SIGTERM, ours), signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(main())
        assert signal.getsignal(signal.SIGTERM) is ours
        assert signal.getsignal(signal.SIGINT) is interrupt, "also where a shell in the background ignores it"
    finally:
        signal.signal(signal.SIGTERM, earlier)
