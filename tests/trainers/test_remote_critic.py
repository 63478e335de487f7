"""A critic in a process of its own learns what a critic inside the trainer learns, and comes back after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from headway.errors import TrainerCrashed
from headway.processes.base import ChildSpec
from headway.trainers.base import ScoringTrainer, TrainerScorer
from headway.trainers.remote_critic import TrainerWithCritic
from headway.trainers.remote_trainer import RemoteTrainer
from headway.types import Batch, SampleGroup

from ..processes.template_pool import Pool
from . import factory
from .critic_targets import ARGS, make_both
from .test_sharded import furthest, weights

HERE = "tests.trainers.critic_targets"
SAME = ("loss", "pg_loss", "grad_norm", "value_loss", "entropy", "ratio_mean", "actions", "optimizer_steps")


@cache
def pool() -> Pool:
    return Pool(HERE)


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    pool().close()


def make_separate() -> TrainerWithCritic:
    trainer = RemoteTrainer(ChildSpec(name="trainer", target=f"{HERE}:make_trainer", args=ARGS), pool().start)
    return TrainerWithCritic(trainer, ChildSpec(name="critic", target=f"{HERE}:make_critic", args=ARGS), pool().start)


async def with_values(trainer: ScoringTrainer, batch: Batch) -> Batch:
    """What the critic stage does."""

    def filled(group: SampleGroup, rows: Sequence[Sequence[float]]) -> SampleGroup:
        pairs = zip(group.samples, rows, strict=True)
        return replace(group, samples=tuple(replace(sample, values=tuple(row)) for sample, row in pairs))

    groups = [filled(group, await TrainerScorer(trainer, "value").score(group)) for group in batch.groups]
    return replace(batch, groups=tuple(groups))


def test_both_halves_learn_what_one_process_learns(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two, again = make_both(), make_separate(), make_separate()
        await two.start()
        for trained in range(3):
            batch = factory.batch(trained, groups=3)
            alone = await one.train(await with_values(one, batch))
            together = await two.train(await with_values(two, batch))
            for name in SAME:
                assert together[name] == pytest.approx(alone[name], rel=1e-9, abs=1e-12), name
            assert together["value_loss"] > 0
            assert furthest(await weights(one), await weights(two)) < 1e-12
        await two.save(tmp_path / "two")
        await one.load(tmp_path / "two")
        await one.save(tmp_path / "one")
        await again.start()
        await again.load(tmp_path / "one")
        batch = factory.batch(3, groups=3)
        alone, together = await one.train(batch), await again.train(batch)  # neither has values: both ask their critic
        assert together["value_loss"] == pytest.approx(alone["value_loss"], rel=1e-9)
        for trainer in (one, two, again):
            await trainer.close()

    pool().run(scenario(), timeout_s=300.0)


def test_a_killed_critic_takes_the_trainer_back_to_the_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = make_separate()
        await trainer.start()
        first = await trainer.train(factory.batch(0))
        await trainer.save(tmp_path / "saved")
        second = await trainer.train(factory.batch(1))
        (critic,) = trainer._critic._peers
        os.kill(critic.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(TrainerCrashed, match="SIGKILL"):
            await TrainerScorer(trainer, "value").score(factory.group(1))
        with pytest.raises(TrainerCrashed, match="SIGKILL"):
            await trainer.train(factory.batch(2))
        await trainer.restart()
        await trainer.load(tmp_path / "saved")
        assert trainer.version == 1
        assert (await trainer.train(factory.batch(1)))["value_loss"] == pytest.approx(second["value_loss"], rel=1e-9)
        assert first["value_loss"] != second["value_loss"]
        await trainer.close()

    pool().run(scenario(), timeout_s=300.0)
