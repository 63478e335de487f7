"""ℓ_p is that of the weights at the start of a step, whoever computes it and however long a group has waited since."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.losses import LossSettings
from headway.algorithms.mismatch import ImportanceWeightSettings, MismatchCorrection
from headway.algorithms.objective import PolicyObjective
from headway.trainers.base import TrainerScorer
from headway.trainers.local.local_learner import score_rows
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.token_batch import TokenRow
from headway.types import Batch, SampleGroup, VersionedScores
from headway.weights.weight_store import WeightStore

from .factory import batch, exact
from .test_packing import gradients, same

DECOUPLED = PolicyObjective(pg_variant="decoupled_ppo", settings=LossSettings(clip_low=5.0, clip_high=5.0))


def settings(**options: Any) -> LocalSettings:
    return LocalSettings(
        objective=DECOUPLED,
        advantages=AdvantageSettings(adv_estimator="grpo"),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        precision="fp64",
        **{"proximal": True, **options},
    )


def scored(group: SampleGroup, version: int | None, rows: Any = None) -> SampleGroup:
    """As `logp` leaves it: with these numbers, or with some that nobody could have meant."""
    rows = rows or [[-9.0] * sample.actions for sample in group.samples]
    samples = zip(group.samples, rows, strict=True)
    return replace(group, samples=tuple(replace(one, logps=row, logps_version=version) for one, row in samples))


def gradient(data: Batch, **options: Any) -> dict[str, Tensor]:
    return gradients(data, objective=DECOUPLED, **{"proximal": True, **options})


@pytest.mark.parametrize("version", [None, 1])
def test_scores_of_other_weights_are_made_anew(version: int | None) -> None:
    data = batch(0)
    stale = replace(data, groups=tuple(scored(group, version) for group in data.groups))
    same(gradient(data), gradient(stale), rtol=0, atol=0)
    trusted = replace(data, groups=tuple(scored(group, 0) for group in data.groups))
    with pytest.raises(AssertionError):
        same(gradient(data), gradient(trusted))


def test_only_groups_that_waited_through_a_step_are_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def watched(forward: Any, rows: Sequence[TokenRow], *more: Any) -> Tensor:
        looked_at.extend(row.sample_id for row in rows)
        return score_rows(forward, rows, *more)

    async def scenario() -> None:
        made, other = (LocalTrainer(exact, settings(), WeightStore()) for _ in range(2))
        data = batch(1)
        waited = await TrainerScorer(made, "policy").score(data.groups[1])
        for one in (made, other):
            await one.train(batch(0))
        now = [await TrainerScorer(made, "policy").score(group) for group in data.groups]
        assert all(isinstance(one, VersionedScores) for one in (waited, *now))
        assert [list(row) for row in now[1]] != [list(row) for row in waited], "the policy has moved"
        groups = [scored(group, rows.version, rows) for group, rows in zip(data.groups, now, strict=True)]  # type: ignore[attr-defined]
        groups[1] = scored(data.groups[1], waited.version, waited)  # type: ignore[attr-defined]
        monkeypatch.setattr("headway.trainers.local.local_learner.score_rows", watched)
        found = await made.train(replace(data, groups=tuple(groups)))
        assert looked_at == [sample.sample_id for sample in data.groups[1].samples]
        wanted = await other.train(data)
        assert len(looked_at) == 4 + 12 and found["loss"] == pytest.approx(wanted["loss"], abs=1e-12)
        for name, weight in other.learner.policy.weights().items():
            torch.testing.assert_close(made.learner.policy.weights()[name], weight, rtol=0, atol=1e-10)

    asyncio.run(scenario())


def test_where_no_loss_asks_for_it_scores_that_came_too_late_are_not_read() -> None:
    plain = PolicyObjective(pg_variant="ppo", settings=LossSettings(clip_low=5.0, clip_high=5.0))
    data = batch(0)
    first = replace(data, groups=(scored(data.groups[0], 0), *(scored(group, 1) for group in data.groups[1:])))
    same(gradients(data, objective=plain), gradients(first, objective=plain), rtol=0, atol=0)


def test_weights_divided_by_their_mean_do_not_depend_on_micro_batches() -> None:
    data, options = batch(0), {"proximal": True}
    weight = ImportanceWeightSettings(upper_bound=1.1)
    plain = replace(DECOUPLED, pg_variant="vanilla", mismatch=MismatchCorrection(weight=weight))
    divided = replace(plain, mismatch=MismatchCorrection(weight=replace(weight, normalised=True)))
    whole, cut = (gradients(data, objective=divided, micro_batch_tokens=size, **options) for size in (4096, 1))
    same(whole, cut)
    before = gradients(data, objective=plain, **options)
    largest = max(whole, key=lambda name: float(whole[name].abs().max()))
    mean = float((before[largest] * whole[largest]).sum() / whole[largest].square().sum())
    assert 0.1 < mean < 1.1 and abs(mean - 1) > 1e-3
    same(before, {name: mean * one for name, one in whole.items()})
