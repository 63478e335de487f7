"""Numbers that do not fit together are refused, with the numbers in the message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import load_config

from .factory import only_problem, problems_of

EXAMPLES = Path(__file__).parents[2] / "examples"

TRAIN, INFER = "actor_train.device_mapping", "actor_infer.device_mapping"
SIZES = "actor_train.strategy_args.strategy_config."
APART: dict[str, Any] = {TRAIN: [0, 1, 2, 3], INFER: [4, 5, 6, 7]}


REFUSALS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "batch not divisible",
        {**APART, "rollout_batch_size": 10, "actor_train.training_args.gradient_accumulation_steps": 4},
        [
            "rollout_batch_size = 10",
            "10 groups × 1 members = 10 samples",
            "1 per device × 4 accumulation × 4 data parallel = 16",
        ],
    ),
    (
        "trajectories that are no whole groups",
        {"train_env_manager.group_size": 8, "rollout_batch_size": 20},
        ["rollout_batch_size = 20", "20 / group_size 8 leaves 4", "multiple of 8"],
    ),
    (
        "a group larger than the batch",
        {"train_env_manager.group_size": 8, "rollout_batch_size": 4},
        ["fewer than one group", "4 / group_size 8"],
    ),
    (
        "parts longer than the sequence",
        {"prompt_length": 600, "response_length": 600, "sequence_length": 1000},
        ["prompt_length 600 + response_length 600 = 1200 > sequence_length 1000"],
    ),
    (
        "a sequence longer than the model",
        {"prompt_length": 600, "response_length": 600, "model_max_length": 1000},
        ["sequence_length = 1200", "1200 > model_max_length 1000"],
    ),
    (
        "a turn longer than the response",
        {"response_length": 100, "actor_infer.generating_args.max_new_tokens": 128},
        ["actor_infer.generating_args.max_new_tokens = 128", "128 > response_length 100"],
    ),
    (
        "an empty pool",
        {**APART, INFER: []},
        ["actor_infer.device_mapping = ()", "empty pool: 0 devices"],
    ),
    (
        "nothing left for generation",
        {TRAIN: "list(range(0,8))", "async_generation_ratio": 1},
        ["actor_infer.device_mapping", "empty pool"],
    ),
    (
        "a share that rounds to nothing",
        {"use_nodes_ratios": [0.5, 0.5, 0.5, 0.1]},
        ["use_nodes_ratios", "0.1 × 8 = 0.8 devices", "empty pool"],
    ),
    (
        "shares that overlap",
        {"use_nodes_ratios": [0.75, 0.5, 0.5, 0.5]},
        ["6 devices for training + 4 for generate > 8"],
    ),
    ("too few shares", {"use_nodes_ratios": [0.5, 0.5]}, ["2 shares", "[train, logp, ref_logp, generate]"]),
    (
        "partly overlapping devices",
        {TRAIN: [0, 1], INFER: [1, 2], "async_generation_ratio": 1},
        ["actor_infer.device_mapping = (1, 2)", "devices [1] are also in", "hybrid_engine: true"],
    ),
    (
        "identical devices in an asynchronous run",
        {TRAIN: [0, 1], INFER: [0, 1], "async_generation_ratio": 1},
        ["devices [0, 1] are also in", "hybrid_engine: true"],
    ),
    (
        "identical devices that shall not be shared",
        {TRAIN: [0, 1], INFER: [0, 1], "hybrid_engine": False},
        ["devices [0, 1] are also in"],
    ),
    (
        "devices that do not exist",
        {**APART, "num_gpus_per_node": 4, "num_nodes": 1},
        ["device 7 is used but there are only 4", "1 nodes × 4 devices = 4"],
    ),
    (
        "a depth beyond the bound",
        {"async_generation_ratio": 1, "pipeline_depth": 1.5},
        ["pipeline_depth = 1.5", "1.5 > async_generation_ratio 1"],
    ),
    (
        "a loss without correction",
        {"async_generation_ratio": 2, "pg_variant": "vanilla"},
        ["pg_variant = 'vanilla'", "async_generation_ratio = 2", "allow_uncorrected_async"],
    ),
    (
        "a replica that does not fit the devices",
        {
            **APART,
            "actor_infer.strategy_args.strategy_name": "vllm",
            "actor_infer.strategy_args.strategy_config.launch": True,
            "actor_infer.strategy_args.strategy_config.tensor_model_parallel_size": 8,
        },
        ["actor_infer.strategy_args", "4 devices", "tensor 8 × pipeline 1 = 8"],
    ),
    (
        "a window beyond the slots",
        {"rollout_batch_size": 10, "staleness_policy": "window", "staleness_window": 30, "async_generation_ratio": 1},
        ["staleness_window = 30", "20 slots = ⌊(1 + 1) × 10⌋"],
    ),
    ("a window that nobody reads", {"staleness_window": 3}, ["staleness_window = 3", "it is wait"]),
    (
        "answers that are not the group",
        {"num_return_sequences_in_group": 8, "actor_infer.generating_args.num_return_sequences": 4},
        ["num_return_sequences = 4", "group size is 8"],
    ),
    (
        "two group sizes",
        {"num_return_sequences_in_group": 4, "train_env_manager.group_size": 8},
        ["num_return_sequences_in_group = 4", "train_env_manager.group_size = 8"],
    ),
    (
        "members that are all the likeliest answer",
        {"num_return_sequences_in_group": 8, "actor_infer.generating_args.temperature": 0},
        ["temperature = 0", "the 8 members of a group would be equal", "validation.generating_args.temperature"],
    ),
    (
        "members that have one action to choose from",
        {"train_env_manager.group_size": 4, "rollout_batch_size": 8, "actor_infer.generating_args.top_k": 1},
        ["top_k = 1", "the 4 members of a group would be equal"],
    ),
    ("rloo alone", {"adv_estimator": "rloo"}, ["group size is 1"]),
    (
        "parts that do not add up",
        {"train_env_manager": {"num_env_groups": 9, "tags": ["a", "b"], "num_groups_partition": [4, 4]}},
        ["4 + 4 = 8", "num_env_groups = 9"],
    ),
    (
        "parts without tags",
        {"train_env_manager": {"num_env_groups": 8, "tags": ["a"], "num_groups_partition": [4, 4]}},
        ["2 parts for 1 tags"],
    ),
    (
        "tags without environments",
        {"train_env_manager": {"tags": ["lake"]}, "custom_envs": {"sea": {}}},
        ["['lake'] are not in custom_envs", "sea"],
    ),
    (
        "KV that our own engine would have to compute anew",
        {"inflight_update": "recompute"},
        ["inflight_update = 'recompute'", "native engine goes on with the KV cache", "vllm and sglang recompute"],
    ),
    (
        "an engine with another model",
        {"pretrain": "a", "actor_infer.model_args.model_name_or_path": "b"},
        ["actor_infer.model_args.model_name_or_path = 'b'", "engines serve the policy that is trained, which is a"],
    ),
    (
        "a reference that is another model",
        {"pretrain": "a", "use_kl_loss": True, "reference.model_args.model_name_or_path": "b"},
        ["reference.model_args.model_name_or_path = 'b'", "the reference is the initial policy, which is a"],
    ),
    ("inverted bounds", {"tis_lower_bound": 2}, ["2 > tis_upper_bound 1"]),
    (
        "an inverted filter",
        {"train_infer_correction.filters": [{"ratio_low": 2}]},
        ["filters[0].ratio_low = 2.0", "1.2"],
    ),
    ("an unknown back end", {"actor_infer.strategy_args.strategy_name": "vlm"}, ["did you mean vllm?", "sglang"]),
]


@pytest.mark.parametrize(("given", "parts"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_it_is_refused_with_the_numbers(given: dict[str, Any], parts: list[str]) -> None:
    message = only_problem(None, given)
    assert [part for part in parts if part not in message] == []


def test_problems_of_arithmetic_are_reported_together() -> None:
    keys = {problem.key for problem in problems_of({"tis_lower_bound": 2, "pipeline_depth": 1, "staleness_window": 3})}
    assert keys == {"tis_lower_bound", "pipeline_depth", "staleness_window"}


@pytest.mark.parametrize("variant", ["ppo", "decoupled_ppo", "tis", "cispo", "topr", "kimi15", "gspo"])
def test_corrected_losses_may_run_asynchronously(variant: str) -> None:
    assert load_config({"async_generation_ratio": 2, "pg_variant": variant}).derived.bound == 2


def test_an_uncorrected_loss_runs_where_the_user_says_so_or_weights_it() -> None:
    given = {"async_generation_ratio": 2, "pg_variant": "vanilla"}
    assert load_config(given, ["allow_uncorrected_async=true"]).derived.bound == 2
    assert load_config(given, ["train_infer_correction.is_weight.enabled=true"]).derived.needs_proximal


def test_devices_may_be_shared_when_asked_or_when_synchronous() -> None:
    assert load_config(
        {"hybrid_engine": True}, {TRAIN: [0, 1], INFER: [1, 2], "async_generation_ratio": 1}
    ).derived.hybrid_engine
    assert load_config(None, {TRAIN: [0, 1], INFER: [0, 1]}).derived.hybrid_engine
    assert not load_config(None, {TRAIN: [0, 1], INFER: [2, 3]}).derived.hybrid_engine


def test_shares_that_add_up_to_one_are_disjoint() -> None:
    devices = load_config({"use_nodes_ratios": [0.25, 0.25, 0.25, 0.25]}).derived.devices
    assert [devices[role] for role in ("actor_train", "logp", "reference", "actor_infer")] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]


def test_a_mapping_wins_over_a_share() -> None:
    devices = load_config({"use_nodes_ratios": [0.5, 0.5, 0.5, 0.5]}, {"reference.device_mapping": [3]}).derived.devices
    assert (devices["reference"], devices["logp"]) == ((3,), (0, 1, 2, 3))


@settings(max_examples=50, deadline=None)
@given(alpha=st.floats(0, 8), share=st.floats(0, 1), prompts=st.integers(1, 512))
def test_slots_are_the_depth_and_never_fewer_than_a_step(alpha: float, share: float, prompts: int) -> None:
    given = {"async_generation_ratio": alpha, "pipeline_depth": alpha * share, "rollout_batch_size": prompts}
    derived = load_config(given).derived
    assert prompts <= derived.slots <= (1 + alpha) * prompts + 1e-6
    assert derived.bound == math.ceil(alpha - 1e-9)


@pytest.mark.parametrize(("alpha", "prompts", "slots"), [(0.5, 8, 12), (0.5, 3, 4), (1.25, 4, 9), (0.3, 10, 13)])
def test_a_fraction_of_alpha_is_a_fraction_of_a_batch(alpha: float, prompts: int, slots: int) -> None:
    resolved = load_config({"async_generation_ratio": alpha, "rollout_batch_size": prompts})
    assert resolved.derived.slots == slots
    assert not [note for note in resolved.notes if "pipeline_depth" in note]


@pytest.mark.parametrize("example", ["arithmetic", "frozen_lake", "images"])
def test_alpha_means_the_same_for_answers_agents_and_pictures(example: str) -> None:
    derived = load_config(EXAMPLES / f"{example}.yaml", {"async_generation_ratio": 0.5}).derived
    assert derived.bound == 1
    assert derived.slots == math.floor(1.5 * derived.groups_per_step) > derived.groups_per_step


def test_a_fraction_of_less_than_one_group_is_said_to_have_no_effect() -> None:
    notes = load_config({"async_generation_ratio": 0.2, "rollout_batch_size": 4}).notes
    assert [note for note in notes if "0.2 has no effect" in note and "0.25 would start one group ahead" in note]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 4])] * 3),
    copies=st.integers(1, 8),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 8),
    updates=st.integers(1, 4),
)
def test_a_batch_made_of_its_factors_always_fits(
    sizes: Any, copies: int, micro: int, accumulation: int, updates: int
) -> None:
    tensor, pipeline, context = sizes
    derived = load_config(
        {"rollout_batch_size": micro * accumulation * copies * updates, "num_gpus_per_node": 1024},
        {
            TRAIN: list(range(tensor * pipeline * context * copies)),
            INFER: [1000],
            SIZES + "tensor_model_parallel_size": tensor,
            SIZES + "pipeline_model_parallel_size": pipeline,
            SIZES + "context_parallel_size": context,
            "actor_train.training_args.per_device_train_batch_size": micro,
            "actor_train.training_args.gradient_accumulation_steps": accumulation,
        },
    ).derived
    assert (derived.data_parallel, derived.optimizer_steps) == (copies, updates)


def test_redundancy_adds_members_and_prompts_but_not_to_the_batch() -> None:
    given = {"rollout_batch_size": 16, "num_return_sequences_in_group": 8, "num_return_sequences_redundancy": 2}
    derived = load_config(given, ["max_additional_running_prompts=4"]).derived
    assert (derived.members_started, derived.samples_per_step, derived.additional_groups) == (10, 128, 4)
    assert load_config({"is_use_additional_prompts": True}).derived.additional_groups == 16
    assert (
        load_config({"is_use_additional_prompts": False, "max_additional_running_prompts": 4}).derived.additional_groups
        == 0
    )


def test_the_model_of_a_role_may_be_written_out_and_follows_the_one_that_is_trained() -> None:
    role = "reference.model_args.model_name_or_path"
    assert load_config({"pretrain": "models/a", "use_kl_loss": True}, {role: "./models/a/"})
    assert load_config({"pretrain": "a"}, {role: "b"}), "nobody asks it"
    config = load_config(
        {"pretrain": "a", "use_kl_loss": True}, {"actor_train.model_args.model_name_or_path": "b"}
    ).config
    assert config.reference.model_args.model_name_or_path == "b"
    assert config.actor_infer.model_args.model_name_or_path == "b"


def test_validation_and_groups_of_one_may_be_greedy() -> None:
    assert load_config(None, {"num_return_sequences_in_group": 8, "validation.generating_args.temperature": 0})
    assert load_config(None, {"actor_infer.generating_args.temperature": 0})


LAKE = {"train_env_manager.group_size": 8}


@pytest.mark.parametrize(
    ("given", "filtered"),
    [
        ({}, True),
        ({"adv_estimator": "rloo"}, True),
        ({"norm_mean_type": "batch"}, False),
        ({"adv_estimator": "gae"}, False),
        ({"adv_estimator": "gae", "norm_mean_type": "group"}, False),
        ({"adv_estimator": "reinforce"}, False),
        ({"adv_estimator": "reinforce", "norm_mean_type": "group"}, True),
        ({"adv_estimator": "reinforce_plus_plus"}, False),
        ({"adv_estimator": "gigpo"}, True),
        ({**LAKE, "adv_estimator": "gigpo"}, False),
        ({**LAKE, "adv_estimator": "step_reinforce"}, False),
        (LAKE, True),
    ],
)
def test_groups_with_equal_rewards_are_replaced_by_default_where_they_teach_nothing(
    given: dict[str, Any], filtered: bool
) -> None:
    given = {"num_return_sequences_in_group": 8, **given}
    assert load_config(None, given).derived.filter_zero_variance is filtered
    asked = load_config(None, {**given, "filter_zero_variance": True})
    assert asked.derived.filter_zero_variance
    assert any("would teach" in note for note in asked.notes) is not filtered
    assert not load_config(None, {**given, "filter_zero_variance": False}).derived.filter_zero_variance


def test_fewer_engine_seats_than_members_is_a_note() -> None:
    given = {"num_return_sequences_in_group": 8, "actor_infer.strategy_args.strategy_config.max_num_seqs": 4}
    assert any("8 members" in note and "= 4" in note for note in load_config(None, given).notes)


def test_devices_that_overlap_in_a_synchronous_run_are_the_hybrid_engine() -> None:
    derived = load_config({TRAIN: "list(range(0,4))", INFER: "list([0,1]) + list([2,3])"}).derived
    assert derived.hybrid_engine and derived.devices["actor_infer"] == (0, 1, 2, 3)
    assert load_config({TRAIN: [0, 1], INFER: [1, 2]}).derived.hybrid_engine
