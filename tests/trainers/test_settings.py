"""What a configuration says about training reaches the trainer."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from headway.algorithms.kl import make_kl_controller
from headway.config import load_config
from headway.errors import ConfigError
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, make_local_settings
from headway.weights.weight_store import WeightStore

from .factory import batch, tiny

SMALL = [
    "rollout_batch_size=3",
    "num_return_sequences_in_group=4",
    "prompt_length=16",
    "response_length=16",
    "max_steps=10",
]


def test_a_configuration_becomes_settings() -> None:
    training = "actor_train.training_args"
    resolved = load_config(
        None,
        [
            *SMALL,
            f"{training}.learning_rate=3e-4",
            f"{training}.warmup_steps=2",
            f"{training}.lr_scheduler_type=cosine",
            f"{training}.per_device_train_batch_size=6",
            "actor_train.model_args.lora_rank=8",
            "actor_train.model_args.disable_gradient_checkpointing=true",
            "actor_infer.generating_args.temperature=0.7",
            "use_kl_loss=true",
        ],
    )
    made = make_local_settings(resolved, threads=2)
    assert made.optimizer.learning_rate == 3e-4 and made.optimizer.rate_at(0) == 1.5e-4
    assert made.optimizer.max_steps == 10 and made.optimizer.schedule == "cosine"
    assert made.micro_batch_tokens == 6 * 32 and not made.gradient_checkpointing
    assert made.lora is not None and (made.lora.rank, made.lora.alpha) == (8, 16.0)
    assert made.temperature == 0.7 and made.threads == 2
    assert made.reference and not made.proximal and made.critic is None


@pytest.mark.parametrize(
    "options",
    [
        ["pg_variant=decoupled_ppo", "async_generation_ratio=1"],
        ["adv_estimator=gae", "value_clip=0.2"],
        ["adv_estimator=step_reinforce"],
        ["adv_estimator=gigpo"],
        ["adv_estimator=rloo", "loss_agg_mode=seq-mean-token-mean", "entropy_loss_coef=0.01"],
        ["add_token_level_kl=true", "whiten_advantages=true", "ppo_epochs=2"],
        ["pg_variant=topr", "actor_train.training_args.gradient_accumulation_steps=3"],
    ],
    ids=lambda options: options[0],
)
def test_every_kind_of_configuration_trains(options: list[str]) -> None:
    async def scenario() -> None:
        resolved = load_config(None, [*SMALL, "actor_train.training_args.learning_rate=1e-3", *options])
        settings, kl = make_local_settings(resolved), partial(make_kl_controller, resolved.config)
        if resolved.config.add_token_level_kl:
            with pytest.raises(ConfigError, match="controller"):
                LocalTrainer(tiny, settings, WeightStore())
        trainer = LocalTrainer(tiny, settings, WeightStore(), make_kl=kl)
        for step in range(2):
            metrics = await trainer.train(batch(step, turns=2))
            assert metrics["grad_norm"] > 0 and metrics["optimizer_steps"] == resolved.derived.optimizer_steps

    asyncio.run(scenario())


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong in ({"epochs": 0}, {"micro_batch_tokens": 0}, {"temperature": 0.0}):
        with pytest.raises(ConfigError):
            LocalSettings(**wrong)  # type: ignore[arg-type]
