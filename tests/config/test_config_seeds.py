"""Configurations that people already have load unchanged and mean the same."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from headway.config import load_config
from headway.config.overrides import parse_override

from .factory import CONFIGS

DIALECT = {
    "decoupled": {"async_generation_ratio": 1.0, "hybrid_engine": False},
    "with_reward": {"async_generation_ratio": 0.0, "hybrid_engine": True},
    "one_step_off": {"async_generation_ratio": 1.0, "hybrid_engine": False},
    "async_pipeline": {"async_generation_ratio": 1.0, "hybrid_engine": False},
}


def test_the_frozen_lake_file_is_1024_groups_of_one_on_four_plus_four_devices() -> None:
    derived = load_config(CONFIGS / "frozen_lake_async.yaml").derived
    assert (derived.async_generation_ratio, derived.bound, derived.slots) == (1.0, 1, 2048)
    assert (derived.groups_per_step, derived.group_size, derived.samples_per_step) == (1024, 1, 1024)
    assert (derived.data_parallel, derived.mini_batch_samples, derived.optimizer_steps) == (4, 2 * 128 * 4, 1)
    assert derived.devices["actor_train"] == (0, 1, 2, 3)
    assert derived.devices["actor_infer"] == (4, 5, 6, 7)
    assert (derived.sequence_length, derived.max_new_tokens) == (8192, 128)


def test_groups_of_one_are_compared_with_the_batch_and_never_filtered() -> None:
    derived = load_config(CONFIGS / "frozen_lake_async.yaml").derived
    assert (derived.norm_mean_type, derived.norm_std_type, derived.filter_zero_variance) == ("batch", "batch", False)


def test_the_rlvr_file_is_64_prompts_of_8_on_16_plus_8_devices() -> None:
    resolved = load_config(CONFIGS / "rlvr_async.yaml")
    derived, config = resolved.derived, resolved.config
    assert (derived.slots, derived.groups_per_step, derived.group_size, derived.samples_per_step) == (128, 64, 8, 512)
    assert (derived.data_parallel, derived.mini_batch_samples, derived.replicas, derived.num_nodes) == (8, 512, 8, 3)
    assert derived.sequence_length == 2048 + 8192
    assert config.actor_infer.generating_args.max_new_tokens == 8192
    assert config.actor_infer.generating_args.num_return_sequences == 8
    assert config.actor_infer.strategy_args.strategy_config.gpu_memory_utilization == 0.85
    assert config.actor_train.data_args.file_name == ("data/math_deepmath_deal.jsonl",)
    assert config.actor_train.training_args.learning_rate == 1e-6


def test_the_webshop_file_is_64_trajectories_in_one_optimizer_step() -> None:
    derived = load_config(CONFIGS / "webshop_async.yaml").derived
    assert (derived.samples_per_step, derived.mini_batch_samples, derived.data_parallel) == (64, 64, 4)


def test_an_environment_manager_turns_trajectories_into_groups() -> None:
    manager = {"train_env_manager.group_size": 8, "train_env_manager.num_env_groups": 128}
    derived = load_config(CONFIGS / "frozen_lake_async.yaml", manager).derived
    assert (derived.pipeline, derived.groups_per_step, derived.group_size) == ("agentic", 128, 8)
    assert (derived.samples_per_step, derived.slots) == (1024, 256)


def test_groups_of_environments_beyond_the_slots_are_redundant_and_said_to_be() -> None:
    manager = {"train_env_manager.group_size": 16, "train_env_manager.group_size_redundancy": 1}
    sizes = {"rollout_batch_size": 128, "async_generation_ratio": 0, "train_env_manager.num_env_groups": 9}
    sizes["actor_train.training_args.gradient_accumulation_steps"] = 16
    resolved = load_config(CONFIGS / "frozen_lake_async.yaml", {**manager, **sizes})
    assert (resolved.derived.slots, resolved.derived.additional_groups) == (8, 1)
    assert resolved.derived.members_started == 17
    assert [note for note in resolved.notes if "1 more than the 8 slots" in note]
    ahead = load_config(CONFIGS / "frozen_lake_async.yaml", {**manager, **sizes, "async_generation_ratio": 1})
    assert ahead.derived.additional_groups == 0, "nine groups play at once; the sixteen slots take turns"


def test_stand_ins_foreign_keys_and_unread_ones_are_noted_once_each() -> None:
    notes = load_config(CONFIGS / "rlvr_async.yaml").notes
    assert len([note for note in notes if "megatron_train" in note and "fsdp2_train" in note]) == 1
    assert len([note for note in notes if "sglang" in note and "native" in note]) == 1
    assert len([note for note in notes if "load_format" in note]) == 1
    assert len([note for note in notes if "sequence_parallel: changes nothing here" in note]) == 1
    assert len([note for note in notes if "infer_batch_size: changes nothing here" in note]) == 1
    assert len([note for note in notes if note.startswith("pg_variant: the ratio")]) == 1
    assert len(notes) == 6


@pytest.mark.parametrize("name", DIALECT)
@pytest.mark.parametrize("form", ["pasted", "lines", "dotted yaml", "nested yaml"])
def test_lines_of_the_second_dialect_mean_the_same_in_every_form(name: str, form: str) -> None:
    text = (CONFIGS / f"{name}.txt").read_text()
    pairs = dict(parse_override(text, []))
    if form == "pasted":
        derived = load_config(None, [text]).derived
    elif form == "lines":
        derived = load_config(None, text.splitlines()).derived
    elif form == "dotted yaml":
        derived = load_config(io.StringIO(json.dumps(pairs))).derived
    else:
        derived = load_config(io.StringIO(json.dumps(tree_of(pairs)))).derived
    assert {key: getattr(derived, key) for key in DIALECT[name]} == DIALECT[name]


def tree_of(pairs: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings within mappings."""
    tree: dict[str, Any] = {}
    for key, value in pairs.items():
        *sections, last = key.split(".")
        spot = tree
        for section in sections:
            spot = spot.setdefault(section, {})
        spot[last] = value
    return tree


def test_the_asynchronous_pipeline_splits_eight_devices_in_half() -> None:
    resolved = load_config(None, [(CONFIGS / "async_pipeline.txt").read_text()])
    assert resolved.derived.devices["actor_train"] == (0, 1, 2, 3)
    assert resolved.derived.devices["logp"] == resolved.derived.devices["reference"] == (0, 1, 2, 3)
    assert resolved.derived.devices["actor_infer"] == (4, 5, 6, 7)
    assert resolved.config.param_update_produce_bucket_mb == 512
    assert resolved.config.param_update_consume_bucket_mb == 128
