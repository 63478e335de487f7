"""What is said about ranks in a configuration: how many there are, what they share, and what they refuse to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import load_config
from headway.errors import ConfigError
from headway.launch.language_components import check_tensor_parallel_model
from headway.placement.machine import Machine
from headway.placement.memory_needs import estimate_component_needs
from headway.placement.placement import make_visible_devices_env, plan_on_machine, plan_placement
from headway.placement.trainer_ranks import make_rank_layout

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SIZES = "actor_train.strategy_args.strategy_config"
APART = {
    "device": "cpu",
    "async_generation_ratio": 1,
    "allow_uncorrected_async": True,
    "actor_train.device_mapping": [0, 1, 2, 3],
    "actor_infer.device_mapping": [4],
}


def test_every_device_of_the_trainer_is_a_rank() -> None:
    resolved = load_config({**APART, f"{SIZES}.tensor_model_parallel_size": 2})
    made = plan_placement(resolved, Machine(cores=16, gpus=0))
    assert (made.ranks, made.train_threads, made.processes) == (4, 2, True)
    assert "4 ranks of the trainer × 2 (data 2 × tensor 2, weights in 2 shards)" in made.summary
    shown = [(part.name, part.rank and part.rank.summary) for part in estimate_component_needs(resolved, made)]
    assert shown == [
        ("trainer/0", "device 0: data 0, context 0, tensor 0"),
        ("trainer/1", "device 1: data 0, context 0, tensor 1"),
        ("trainer/2", "device 2: data 1, context 0, tensor 0"),
        ("trainer/3", "device 3: data 1, context 0, tensor 1"),
        ("engine/0", None),
    ]


def test_a_trainer_that_was_given_no_devices_is_one_process() -> None:
    made = plan_placement(load_config({"device": "cpu", "num_gpus_per_node": 8}))
    assert made.ranks == 1 and estimate_component_needs(load_config({}), made)[0].name == "trainer"


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "context_parallel_size"])
def test_on_a_cpu_sizes_make_the_ranks_that_they_need(name: str) -> None:
    made = plan_placement(load_config({"device": "cpu", "num_gpus_per_node": 8, f"{SIZES}.{name}": 2}))
    assert made.ranks == 2 and made.layout.text == f"{name.partition('_')[0]} 2"
    with pytest.raises(ConfigError, match="2 ranks of the trainer are processes") as refused:
        plan_placement(load_config({"device": "cpu", "num_gpus_per_node": 8, f"{SIZES}.{name}": 2, "processes": False}))
    assert f"{SIZES}.{name}: 1" in refused.value.hint


@pytest.mark.parametrize(("gpus", "options"), [(1, {}), (8, {"processes": False})])
@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "context_parallel_size"])
def test_sizes_that_one_process_cannot_use_are_named(gpus: int, options: dict[str, Any], name: str) -> None:
    given = {**APART, "device": "cuda", **options, f"{SIZES}.{name}": 2}
    made = plan_on_machine(load_config(given), Machine(cores=8, gpus=gpus))
    assert made.ranks == 1
    assert f"actor_train: {name} = 2 has no effect here: one process trains the whole model" in made.notes


@pytest.mark.parametrize(
    "options",
    [
        {f"{SIZES}.pipeline_model_parallel_size": 2},
        {f"{SIZES}.expert_model_parallel_size": 4},
        {f"{SIZES}.tensor_model_parallel_size": 3},
        {f"{SIZES}.context_parallel_size": 8},
    ],
)
def test_sizes_that_only_make_a_model_fit_are_fsdp2_over_all_ranks(options: dict[str, Any]) -> None:
    made = plan_on_machine(load_config({**APART, **options}), Machine(cores=8, gpus=0))
    assert (made.ranks, made.layout.text) == (4, "data 4")
    key, value = next(iter(options.items()))
    (note,) = made.notes
    assert f"{key.rpartition('.')[2]} = {value} has no effect here: FSDP2 cuts weights" in note and "gathers" in note


def test_of_two_sizes_the_one_that_divides_is_used() -> None:
    sizes = {f"{SIZES}.tensor_model_parallel_size": 3, f"{SIZES}.context_parallel_size": 2}
    assert (
        plan_on_machine(load_config({**APART, **sizes}), Machine(cores=8, gpus=0)).layout.text == "data 2 × context 2"
    )


@pytest.mark.parametrize("cuda", [False, True])
def test_a_configuration_for_a_cluster_is_placed_on_one_machine(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    for name in ("frozen_lake_async", "webshop_async"):
        made = plan_placement(load_config(str(CONFIGS / f"{name}.yaml")))
        assert (made.device, made.ranks) == (("cuda", 1) if cuda else ("cpu", 4))


def test_every_rank_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = plan_placement(load_config({**APART, "device": "cuda"}))
    assert made.ranks == 4 and made.processes
    assert [make_visible_devices_env(made, f"trainer/{rank}")["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == [
        "0",
        "1",
        "2",
        "3",
    ]
    assert "trainer 0–3" in made.summary


@pytest.mark.parametrize("name", ["megatron_train", "deepspeed_train"])
def test_sizes_of_other_trainers_are_taken_over_with_one_line(name: str) -> None:
    resolved = load_config(
        {**APART, "actor_train.strategy_args.strategy_name": name, f"{SIZES}.context_parallel_size": 2}
    )
    assert sum(f"{name} is not in this build, fsdp2_train is used instead" in note for note in resolved.notes) == 1
    assert make_rank_layout(resolved, plan_placement(resolved).ranks).text == "data 2 × context 2"


def test_ranks_without_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks of the trainer are processes"):
        plan_placement(load_config({**APART, "processes": False}))


def test_layers_with_adapters_are_cut_by_weights_and_one_line_says_so() -> None:
    sizes = {f"{SIZES}.tensor_model_parallel_size": 2, "actor_train.model_args.lora_rank": 4}
    made = plan_on_machine(load_config({**APART, **sizes}), Machine(cores=8, gpus=0))
    assert made.layout.text == "data 4" and sum("tensor_model_parallel_size = 2 has no" in n for n in made.notes) == 1


def model(directory: Path, kind: str, **shape: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    usual = {"vocab_size": 8, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1}
    config = AutoConfig.for_model(kind, **{**usual, "num_attention_heads": 6, **shape})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("kind", "shape", "size", "message"),
    [
        ("llama", {"num_key_value_heads": 2}, 2, None),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 4}, 2, None),
        ("mistral", {"num_key_value_heads": 2, "head_dim": 4}, 2, None),
        ("qwen2", {"num_key_value_heads": 1}, 2, "num_key_value_heads"),
        ("phi3", {"num_key_value_heads": 2, "pad_token_id": 0}, 2, "neither cut by columns nor by rows"),
    ],
)
def test_models_whose_layers_cannot_be_shared_are_refused(
    tmp_path: Path, kind: str, shape: dict[str, Any], size: int, message: str | None
) -> None:
    resolved = load_config({**APART, f"{SIZES}.tensor_model_parallel_size": size})
    path = model(tmp_path, kind, **shape)
    if message is None:
        check_tensor_parallel_model(make_rank_layout(resolved, 4), path)
        return
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel_model(make_rank_layout(resolved, 4), path)
