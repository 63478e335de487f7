"""The trainer of denoising steps: contract, exact ratios, KL in closed form, NFT, LoRA."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.algorithms.diffusion_nft import DiffusionNftParams
from headway.denoising.models.denoiser_storage import load_small_mmdit
from headway.denoising.models.mmdit import is_small_mmdit
from headway.denoising.settings import DenoisingSettings
from headway.errors import TrainerError
from headway.ledger.ledger_records import encode_episode
from headway.trainers.base import Trainer
from headway.trainers.local.settings import LoraSettings
from headway.types import Batch, SampleGroup
from tests.contracts.trainer_contract import TrainerContract
from tests.denoising.factory import groups_of, local, make_model, make_trainer, run


@cache
def groups(numbers: tuple[int, ...], **settings: Any) -> tuple[SampleGroup, ...]:
    return groups_of(make_model(), numbers, **settings)


def batch(trained: int = 0, **settings: Any) -> Batch:
    return Batch(trained=trained, groups=groups((10 * trained + 1, 10 * trained + 2), **settings))


class TestDenoisingTrainer(TrainerContract):
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        run(scenario)

    def make(self) -> Trainer:
        return make_trainer()

    def batch(self, trained: int) -> Batch:
        return batch(trained)

    async def crash(self, trainer: Trainer) -> None:
        trainer.abandon("broken")  # type: ignore[attr-defined]

    def contents(self, trainer: Trainer) -> object:
        return {name: one.tolist() for name, one in trainer.learner.policy.weights().items()}  # type: ignore[attr-defined]


class TestNftTrainer(TestDenoisingTrainer):
    def make(self) -> Trainer:
        return make_trainer(nft=DiffusionNftParams(), denoising=DenoisingSettings(window="last"))

    def batch(self, trained: int) -> Batch:
        return batch(trained, window="last")


def trained(trainer: Any, *batches: Batch) -> list[dict[str, float]]:
    found = []

    async def scenario() -> None:
        for one in batches:
            found.append(dict(await trainer.train(one)))
        await trainer.close()

    asyncio.run(scenario())
    return found


@pytest.mark.parametrize("kind", ["full", "random"])
@pytest.mark.parametrize("sampler", ["cps", "sde"])
def test_on_fresh_samples_every_ratio_is_one(kind: Any, sampler: Any) -> None:
    settings = {"window": kind, "sampler": sampler}
    (metrics,) = trained(make_trainer(denoising=DenoisingSettings(**settings)), batch(0, **settings))
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actions"] == 8 * (5 if kind == "full" else 2) and metrics["lag_max"] == 0.0


def test_guidance_of_training_is_that_of_the_rollout() -> None:
    denoising = DenoisingSettings(guidance=3.0)
    (metrics,) = trained(make_trainer(denoising=denoising), batch(0))
    assert abs(metrics["ratio_max"] - 1.0) > 1e-3, "made without guidance, trained with it"


def test_one_step_later_the_ratio_is_against_the_behaviour_policy() -> None:
    denoising = DenoisingSettings()
    trainer = make_trainer(denoising=denoising)
    first, second = trained(trainer, batch(0), replace(batch(0), trained=1))
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert abs(second["ratio_max"] - 1.0) > 1e-3 and second["lag_mean"] == 1.0


def test_cutting_a_batch_changes_no_gradient() -> None:
    def after(size: int) -> Any:
        trainer = make_trainer(local=local())
        trainer._denoising = replace(trainer._denoising, micro_batch_samples=size)
        trainer._learner = trainer._make_learner()
        metrics = trained(trainer, batch(0))[0]
        return metrics["grad_norm"], metrics["loss"]

    assert after(1) == pytest.approx(after(8), rel=1e-4, abs=1e-7)


def test_where_memory_runs_out_the_same_step_is_made_in_smaller_parts() -> None:
    (usual,) = trained(make_trainer(), batch(0))
    trainer = make_trainer()
    transition = trainer.learner.policy.transition  # type: ignore[attr-defined]

    def small(x_NCHW: torch.Tensor, *args: Any, **options: Any) -> Any:
        if len(x_NCHW) > 2:
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        return transition(x_NCHW, *args, **options)

    trainer.learner.policy.transition = small  # type: ignore[attr-defined]
    (metrics,) = trained(trainer, batch(0))
    assert metrics["micro_batch_samples"] == 1 and metrics["micro_batches"] > usual["micro_batches"]
    assert metrics["grad_norm"] == pytest.approx(usual["grad_norm"], rel=1e-4)
    assert metrics["loss"] == pytest.approx(usual["loss"], abs=1e-6)


def test_the_kl_to_the_start_is_zero_there_and_grows() -> None:
    trainer = make_trainer(kl_coef=0.5)
    first, second = trained(trainer, batch(0), replace(batch(0), trained=1))
    assert first["kl_loss"] == 0.0 and second["kl_loss"] > 1e-6


def test_published_kl_is_the_exact_one_times_the_step() -> None:
    def second(mode: Any) -> float:
        settings: dict[str, Any] = {"sampler": "sde", "window": "random"}
        trainer = make_trainer(kl_coef=0.5, kl_mode=mode, denoising=DenoisingSettings(**settings))
        return trained(trainer, batch(0, **settings), replace(batch(0, **settings), trained=1))[1]["kl_loss"]

    assert 0 < second("compatible") < 0.5 * second("exact")


def test_the_reward_goes_up_on_what_was_trained() -> None:
    """Brighter pictures are better: after a few steps on fresh samples they are brighter."""
    for nft in (None, DiffusionNftParams()):
        settings: dict[str, Any] = {"window": "random" if nft is None else "last"}
        trainer: Any = make_trainer(nft=nft, denoising=DenoisingSettings(**settings))
        rewards: list[float] = []

        async def step(number: int, trainer: Any = trainer, rewards: Any = rewards, settings: Any = settings) -> None:
            model = make_model()
            model.load_state_dict(trainer.learner.policy.weights())
            made = groups_of(model, (1, 2), version=number, members=6, steps=4, **settings)
            metrics = await trainer.train(Batch(trained=number, groups=made))
            rewards.append(metrics["reward"])

        async def scenario(step: Any = step) -> None:
            for number in range(5):
                await step(number)

        asyncio.run(scenario())
        assert rewards[-1] > rewards[0] + 0.02, (nft, rewards)


def test_a_checkpoint_is_a_model_that_can_be_loaded(tmp_path: Path) -> None:
    trainer = make_trainer()

    async def scenario() -> None:
        await trainer.train(batch(0))
        await trainer.save(tmp_path / "c")

    asyncio.run(scenario())
    assert is_small_mmdit(tmp_path / "c")
    weights = load_small_mmdit(tmp_path / "c").state_dict()
    for name, one in trainer.learner.policy.weights().items():
        assert torch.equal(one, weights[name])


def test_lora_moves_adapters_only_and_publishes_whole_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trainer = make_trainer(local=local(lora=LoraSettings(rank=2)), kl_coef=0.1)
    before = {name: one.clone() for name, one in trainer.learner.policy.weights().items()}
    assert before.keys() == make_model().state_dict().keys()
    assert all("lora_" in name for name in trainer.learner.policy.trainable())
    first, second = trained_open(trainer, batch(0), replace(batch(0), trained=1))
    assert first["kl_loss"] == 0.0 and second["kl_loss"] > 0
    after = trainer.learner.policy.weights()
    assert any(not torch.equal(before[name], after[name]) for name in before)

    async def again() -> None:
        await trainer.save(tmp_path / "c")
        other = make_trainer(local=local(lora=LoraSettings(rank=2)))
        await other.load(tmp_path / "c")
        for name, one in other.learner.policy.weights().items():
            assert torch.equal(one, after[name])

    asyncio.run(again())


def trained_open(trainer: Any, *batches: Batch) -> list[dict[str, float]]:
    found = []

    async def scenario() -> None:
        for one in batches:
            found.append(dict(await trainer.train(one)))

    asyncio.run(scenario())
    return found


def test_a_step_without_its_latents_is_refused_by_name() -> None:
    made = groups((1, 2))
    sample = made[0].samples[0]
    turn = sample.episode.turns[0]
    bare = tuple(replace(step, after=b"") for step in turn.generation.actions)
    torn = replace(sample.episode, turns=(replace(turn, generation=replace(turn.generation, actions=bare)),))
    group = replace(made[0], samples=(replace(sample, episode=torn), *made[0].samples[1:]))
    with pytest.raises(TrainerError, match=r"sample 1\.0, step \d: its latents are missing"):
        trained(make_trainer(), Batch(trained=0, groups=(group,)))


def test_scores_are_what_the_engine_said() -> None:
    group = groups((1, 2))[0]
    trainer = make_trainer()

    async def scenario() -> None:
        rows = await trainer.score("policy", group)
        for row, sample in zip(rows, group.samples, strict=True):
            assert row == pytest.approx(list(sample.episode.turns[0].generation.logps), abs=1e-4)

    asyncio.run(scenario())


def test_what_a_sample_needs_in_the_ledger_is_its_latents_its_picture_and_little_else() -> None:
    """Of 8 × 8 pixels, 2 of 6 steps trained: three latents in float32 and one picture."""
    for window, latents in (("random", 3), ("full", 6), ("last", 1)):
        sample = groups((1, 2), window=window)[0].samples[0]
        size = len(encode_episode(sample.episode))
        assert latents * 8 * 8 * 4 + 3 * 8 * 8 < size < latents * 8 * 8 * 4 + 3 * 8 * 8 + 400
