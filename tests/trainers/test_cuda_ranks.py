"""One rank of a trainer on a GPU, over NCCL: it learns what one process learns, and its losses are named.

NCCL takes one rank on a GPU, and there is one GPU here: several ranks are tested over gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import TrainerCrashed
from headway.processes.base import ChildSpec
from headway.trainers.sharded.ranked_trainer import MultiRankTrainer, RankProcesses

from ..processes.template_pool import Pool
from . import factory
from .sharded_targets import whole
from .test_sharded import furthest, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool("tests.trainers.sharded_targets")
    yield made
    made.close()


def make_rank(pool: Pool, **args: Any) -> MultiRankTrainer:
    given = {"device": "cuda", "backend": "nccl", **args}
    spec = ChildSpec(name="trainer", target="tests.trainers.sharded_targets:rank", args=given)
    return MultiRankTrainer(spec, pool.start, ranks=1, rank_s=5.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_over_nccl_learns_what_one_process_learns(pool: Pool, tmp_path: Path, precision: str) -> None:
    async def scenario() -> None:
        alone, rank = whole({"device": "cuda", "precision": precision}), make_rank(pool, precision=precision)
        near = 1e-4 if precision == "fp32" else 2e-2
        try:
            for trained in range(3):
                batch = factory.batch(trained)
                one, other = await alone.train(batch), await rank.train(batch)
                assert other["loss"] == pytest.approx(one["loss"], rel=near, abs=near)
                assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=10 * near)
                if precision == "fp32":
                    assert furthest(await weights(alone), await weights(rank)) < 1e-3
            await rank.save(tmp_path / "a")
            await rank.restart()
            await rank.load(tmp_path / "a")
            assert rank.version == 3
            again = await rank.train(factory.batch(3))
            assert again["loss"] == pytest.approx((await alone.train(factory.batch(3)))["loss"], rel=near, abs=near)
        finally:
            await rank.close()
            await alone.close()

    pool.run(scenario(), 120.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_over_nccl_that_is_lost_is_named_and_comes_back(pool: Pool, number: signal.Signals) -> None:
    async def scenario() -> None:
        trainer = make_rank(pool, precision="fp32")
        try:
            await trainer.train(factory.batch(0))
            assert isinstance(trainer._child, RankProcesses)
            os.kill(trainer._child._peers[0].pid, number)  # type: ignore[attr-defined]
            with pytest.raises(TrainerCrashed, match=r"in phase train.*trainer/0|trainer/0.*in phase train"):
                await trainer.train(factory.batch(1))
            await trainer.restart()
            await trainer.train(factory.batch(0))
            assert trainer.version == 1
        finally:
            await trainer.close()

    pool.run(scenario(), 120.0)
