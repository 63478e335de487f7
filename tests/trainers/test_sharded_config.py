"""What is said about ranks in a configuration: how many there are, what they share, and what they refuse to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import load_config
from headway.errors import ConfigError
from headway.launch.language_components import check_tensor_parallel_model
from headway.launch.machine import Machine
from headway.launch.memory_needs import estimate_component_needs
from headway.launch.placement import (
    make_rank_layout,
    make_visible_devices_env,
    plan_placement,
)

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
    with pytest.raises(ConfigError, match=f"{name} = 2: 1 devices are not whole copies.*or a multiple of 2 devices"):
        load_config({f"{SIZES}.{name}": 2})


@pytest.mark.parametrize(("gpus", "options"), [(1, {}), (8, {"processes": False})])
@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "context_parallel_size"])
def test_sizes_that_one_process_would_ignore_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    given = {**APART, "device": "cuda", **options}
    assert plan_placement(load_config(given)).ranks == 1, "with sizes of 1, many devices are one process"
    with pytest.raises(ConfigError, match="the trainer would be one process here") as refused:
        plan_placement(load_config({**given, f"{SIZES}.{name}": 2}))
    assert (refused.value.key, refused.value.value) == (f"{SIZES}.{name}", 2)
    assert refused.value.hint.startswith("1, or actor_train.device_mapping with GPUs of this machine")


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
    assert "trainer/3 3" in made.summary and "trainer 0" not in made.summary


@pytest.mark.parametrize("name", ["megatron_train", "deepspeed_train"])
def test_sizes_of_other_trainers_are_taken_over_with_one_line(name: str) -> None:
    resolved = load_config(
        {**APART, "actor_train.strategy_args.strategy_name": name, f"{SIZES}.context_parallel_size": 2}
    )
    assert sum(f"{name} is not in this build, fsdp2_train is used instead" in note for note in resolved.notes) == 1
    assert make_rank_layout(resolved, plan_placement(resolved).ranks).text == "data 2 × context 2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({f"{SIZES}.pipeline_model_parallel_size": 2}, "one device after the other"),
        ({f"{SIZES}.expert_model_parallel_size": 2}, "experts"),
        ({f"{SIZES}.tensor_model_parallel_size": 3}, "not whole copies"),
        ({f"{SIZES}.context_parallel_size": 8}, "not whole copies"),
        ({"processes": False}, "ranks of the trainer are processes"),
        ({f"{SIZES}.tensor_model_parallel_size": 2, "actor_train.model_args.lora_rank": 4}, "adapters"),
    ],
)
def test_what_ranks_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_placement(load_config({**APART, **options}))


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
