"""What runs, but not as one may think, is said in one line; what changes nothing is not mentioned."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import load_config

from .factory import only_problem

PARTS = "strategy_args.strategy_config"


def notes_of(given: dict[str, Any]) -> list[str]:
    return list(load_config(None, {"num_return_sequences_in_group": 8, **given}).notes)


def test_keys_without_effect_are_noted_with_the_reason_and_all_roles_that_have_them() -> None:
    given = {
        "logging_steps": 5,
        "actor_train.infer_batch_size": 4,
        "reference.infer_batch_size": 4,
        "actor_train.model_args.attn_implementation": "fa2",
        f"actor_infer.{PARTS}.block_size": 32,
        f"actor_train.{PARTS}.sequence_parallel": True,
        f"actor_train.{PARTS}.use_distributed_optimizer": False,
        f"actor_train.{PARTS}.recompute_granularity": "selective",
    }
    notes = notes_of(given)
    assert len(notes) == len(given) - 1
    assert "actor_train.infer_batch_size, reference.infer_batch_size: change nothing here; forward" in "\n".join(notes)
    for key in given:
        assert sum(key in note for note in notes) == 1


def test_keys_without_effect_are_not_mentioned_where_they_ask_for_what_is_done_anyway() -> None:
    given = {
        "logging_steps": 1,
        "actor_train.infer_batch_size": 1,
        "actor_train.model_args.attn_implementation": "auto",
        f"actor_infer.{PARTS}.block_size": 16,
        f"actor_train.{PARTS}.use_distributed_optimizer": True,
        f"actor_train.{PARTS}.recompute_granularity": "full",
        "reference.model_args.disable_gradient_checkpointing": True,
        "rewards.default.strategy_args.strategy_name": "native",
    }
    assert notes_of(given) == []


def test_half_precision_without_loss_scaling_is_refused_for_training_alone() -> None:
    message = only_problem(None, {"actor_train.model_args.dtype": "fp16"})
    assert "actor_train.model_args.dtype = 'fp16'" in message and "bf16 or fp32" in message
    assert notes_of({"actor_infer.model_args.dtype": "fp16"}) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "CPUs do not multiply it"),
        (
            {f"actor_infer.{PARTS}.launch": True, "actor_infer.strategy_args.strategy_name": "vllm"},
            "an option of the native engine",
        ),
    ],
)
@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype"])
def test_8_bits_are_refused_where_engines_do_not_have_them(name: str, changes: dict[str, Any], reason: str) -> None:
    message = only_problem(None, {f"actor_infer.model_args.{name}": "fp8", **changes})
    assert f"actor_infer.model_args.{name} = 'fp8'" in message and reason in message
    assert notes_of({f"actor_infer.model_args.{name}": "fp8"}) == []


SAMPLING = "actor_infer.generating_args"
SGLANG = {"actor_infer.strategy_args.strategy_name": "sglang", f"actor_infer.{PARTS}.url": "http://127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("given", "noted"),
    [
        ({"pg_variant": "gspo"}, False),
        ({"pg_variant": "gspo", f"{SAMPLING}.top_p": 0.99}, True),
        ({"pg_variant": "gspo", f"{SAMPLING}.top_p": 0.99, "pg_clip": 0.2}, False),
        ({"pg_variant": "gspo", f"{SAMPLING}.top_k": 100}, True),
        ({"pg_variant": "gspo", f"{SAMPLING}.min_p": 0.1}, True),
        ({"pg_variant": "ppo", f"{SAMPLING}.top_p": 0.9, f"{SAMPLING}.top_k": 100}, False),
        ({"pg_variant": "ppo", f"{SAMPLING}.top_p": 0.7}, True),
        ({"pg_variant": "decoupled_ppo", f"{SAMPLING}.top_p": 0.7}, False),
        ({"pg_variant": "gspo", f"{SAMPLING}.top_p": 0.7, **SGLANG}, False),
    ],
)
def test_a_truncated_distribution_is_noted_where_its_ratio_can_leave_the_clip(
    given: dict[str, Any], noted: bool
) -> None:
    assert any("ratios are below 1 on policy" in note for note in notes_of(given)) is noted


def test_a_weight_that_the_loss_has_already_is_noted() -> None:
    weight = {"train_infer_correction.is_weight.enabled": True}
    assert notes_of(weight) == []
    (note,) = notes_of({**weight, "pg_variant": "decoupled_ppo"})
    assert "weighted by it twice" in note
