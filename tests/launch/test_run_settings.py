"""From configuration to settings: every option that the scheduler reads arrives there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.launch.training_session import prepare_run
from headway.settings import RunSettings, make_run_settings


def settings(**options: Any) -> RunSettings:
    return make_run_settings(load_config({"rollout_batch_size": 8, **options}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            {
                "groups_per_step": 8,
                "group_size": 1,
                "async_generation_ratio": 0.0,
                "staleness_policy": "wait",
                "slots": 8,
            },
        ),
        ({"async_generation_ratio": 2.5}, {"async_generation_ratio": 2.5, "bound": 3, "slots": 28}),
        (
            {"async_generation_ratio": 2, "pipeline_depth": 1},
            {"async_generation_ratio": 2.0, "pipeline_depth": 1.0, "slots": 16},
        ),
        (
            {"async_generation_ratio": 1, "staleness_policy": "window"},
            {"staleness_policy": "window", "staleness_window": 8},
        ),
        ({"selection_order": "oldest"}, {"selection_order": "oldest"}),
        ({"max_additional_running_prompts": 3}, {"additional_groups": 3}),
        ({"num_return_sequences_in_group": 4, "num_return_sequences_redundancy": 2}, {"redundant_members": 2}),
        (
            {"rollout_scheduling": "batch", "env_scheduling": "barrier"},
            {"rollout_scheduling": "batch", "env_scheduling": "barrier"},
        ),
        ({"is_num_return_sequences_expand": False}, {"is_num_return_sequences_expand": False}),
        ({"enable_dual_buffer": False, "with_reward": False}, {"enable_dual_buffer": False, "with_reward": False}),
        ({"hybrid_engine": True}, {"hybrid_engine": True}),
        (
            {"save_steps": 7, "eval_steps": 3, "val_batch_size": 5},
            {"save_steps": 7, "eval_steps": 3, "val_batch_size": 5},
        ),
        ({"max_steps": 9, "seed": 3}, {"max_steps": 9, "seed": 3}),
        ({"save_total_limit": 2}, {"save_total_limit": 2}),
        ({}, {"max_num_gen_batches": 10, "save_total_limit": 5}),
        ({"max_num_gen_batches": 0}, {"max_num_gen_batches": 0}),
    ],
)
def test_an_option_arrives_at_the_scheduler(options: dict[str, Any], expected: dict[str, Any]) -> None:
    made = settings(**options)
    assert {name: getattr(made, name) for name in expected} == expected


def test_sampling_and_deadlines_arrive() -> None:
    made = settings(
        response_length=77,
        actor_infer={"generating_args": {"temperature": 0.5, "top_k": 9, "stop": ["end"]}},
        reliability={"request_timeout_s": 12, "replica_restarts": 1},
    )
    assert (made.sampling.max_new_tokens, made.sampling.temperature) == (77, 0.5)
    assert (made.sampling.top_k, made.sampling.stop) == (9, ("end",))
    assert (made.reliability.request_timeout_s, made.reliability.replica_restarts) == (12, 1)


def test_an_agentic_batch_is_counted_in_groups() -> None:
    made = settings(train_env_manager={"group_size": 4})
    assert (made.groups_per_step, made.group_size) == (2, 4)


def test_validation_draws_as_it_is_told_and_else_as_training_does() -> None:
    made = settings(
        response_length=50,
        actor_infer={"generating_args": {"temperature": 0.7}},
        validation={"generating_args": {"temperature": 0.0, "max_new_tokens": 9}},
    )
    assert made.eval_sampling is not None
    assert (made.eval_sampling.temperature, made.eval_sampling.max_new_tokens) == (0.0, 9)
    assert settings(actor_infer={"generating_args": {"temperature": 0.7}}).eval_sampling.temperature == 0.7  # type: ignore[union-attr]


def test_a_validation_asks_for_one_answer_unless_it_is_told_another_number() -> None:
    assert settings().eval_answers == 1
    assert settings(validation={"generating_args": {"num_return_sequences": 4}}).eval_answers == 4


def test_without_a_number_all_held_out_tasks_are_used() -> None:
    assert make_run_settings(load_config({}), held_out=37).val_batch_size == 37
    assert make_run_settings(load_config({"val_batch_size": 5}), held_out=37).val_batch_size == 5


@pytest.mark.parametrize(("given", "steps"), [({}, 15), ({"max_steps": 4}, 4), ({"max_steps": 400}, 15)])
def test_passes_over_the_data_end_a_run_unless_fewer_steps_are_given(
    tmp_path: Path, given: dict[str, int], steps: int
) -> None:
    """21 rows make 5 whole batches of 4."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n" for i in range(21)))
    data = {"file_name": [str(file)], "template": "none"}
    tree: dict[str, Any] = {"pretrain": "tiny-sums", "rollout_batch_size": 4, "max_epochs": 3, "sequence_length": 64}
    tree |= {"rewards": {"math": {}}, **given}
    prepared = prepare_run(load_config({**tree, "actor_train": {"data_args": data}}))
    assert prepared.resolved.config.max_steps == steps
    assert make_run_settings(prepared.resolved).max_steps == steps
    assert prepared.resolved.given().get("max_steps") == (4 if steps == 4 else None), "counted anew when it goes on"
