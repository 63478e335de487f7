"""Ranks of a denoising model learn what one process learns, and leave checkpoints that either can read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headway.processes.base import ChildSpec
from headway.trainers.sharded.ranked_trainer import MultiRankTrainer
from headway.types import Batch
from tests.denoising.factory import groups_of, make_model
from tests.denoising.rank_targets import whole
from tests.processes.template_pool import Pool
from tests.trainers.test_sharded import furthest, weights

SAME_UP_TO_ROUNDING = ("loss", "pg_loss", "kl_loss", "grad_norm", "ratio_mean", "ratio_max", "actions")
SAME = ("samples", "optimizer_steps", "learning_rate", "reward", "denoiser_rows", "skipped_samples")
CASES: list[Any] = [
    pytest.param({"kl": 0.01, "mini": 5, "proximal": True}, id="policy-gradients-with-kl"),
    pytest.param({"nft": True, "kl": 0.01, "micro": 2}, id="diffusion-nft"),
    pytest.param({"lora": True, "kl": 0.01}, id="adapters", marks=pytest.mark.sharded),
    pytest.param({"guidance": 2.0, "kl": 0.01}, id="guidance", marks=pytest.mark.sharded),
]


@cache
def pool() -> Pool:
    return Pool("tests.denoising.rank_targets")


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    pool().close()


@cache
def batch(trained: int, nft: bool) -> Batch:
    """Nine samples, which two ranks cannot share evenly."""
    window = {"window": "last"} if nft else {}
    numbers = (3 * trained + 1, 3 * trained + 2, 3 * trained + 3)
    groups = groups_of(make_model(), numbers, members=3, **window)
    return Batch(trained=trained, groups=groups)


@pytest.mark.parametrize("options", CASES)
def test_two_ranks_learn_what_one_process_learns(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("lora"):
        pytest.importorskip("peft")
    batches = [batch(trained, options.get("nft", False)) for trained in range(3)]

    async def scenario() -> None:
        one = whole(options)
        spec = ChildSpec(name="trainer", target="tests.denoising.rank_targets:rank", args=options)
        many, again = (MultiRankTrainer(spec, pool().start, ranks=2) for _ in range(2))
        try:
            await many.start()
            assert furthest(await weights(one), await weights(many)) < 1e-6
            for made in batches[:2]:
                alone, together = await one.train(made), await many.train(made)
                for name in SAME_UP_TO_ROUNDING:
                    if name in alone:
                        assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
                for name in SAME:
                    assert together[name] == pytest.approx(alone[name], rel=1e-6), name
                assert furthest(await weights(one), await weights(many)) < 1e-4
            await many.save(tmp_path / "ranks")
            await one.load(tmp_path / "ranks")
            await one.save(tmp_path / "single")
            await again.load(tmp_path / "single")
            alone, together = await one.train(batches[2]), await again.train(batches[2])
            assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4, abs=1e-6)
            assert furthest(await weights(one), await weights(again)) < 1e-4
        finally:
            for trainer in (one, many, again):
                await trainer.close()

    pool().run(scenario(), timeout_s=300.0)
