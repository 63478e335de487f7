"""When versions are adapters alone, and what that saves."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import load_config
from headway.errors import ConfigError
from headway.launch.adapter_bases import find_adapter_problem
from headway.placement.machine import Machine
from headway.placement.placement import Placement, plan_on_machine

LORA = {"actor_train.model_args.lora_rank": 32}


def plan(gpus: int = 1, **options: Any) -> Placement:
    chosen = {"pretrain": "Qwen/Qwen2.5-7B", "response_length": 3584, "prompt_length": 512, **LORA, **options}
    return plan_on_machine(load_config(chosen), Machine(cores=8, gpus=gpus, gpu_memory_gib=141.0 if gpus else 0.0))


def test_adapters_travel_alone_where_our_engine_follows_one_rank() -> None:
    assert plan().transport.adapters and plan(0).transport.adapters
    assert not plan(**{"weight_transfer.adapters": "merged"}).transport.adapters
    assert not plan(**{"actor_train.model_args.lora_rank": None}).transport.adapters
    assert not plan(**{"actor_infer.model_args.dtype": "fp8"}).transport.adapters
    assert not plan(**{"actor_train.model_args.quantization": "nf4"}).transport.adapters
    assert not plan().without_trainer().transport.adapters
    ranks = {"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": [2, 3]}
    assert not plan(4, **ranks, allow_uncorrected_async=True, async_generation_ratio=1).transport.adapters


def test_a_shared_base_is_counted_once() -> None:
    apart, merged = plan(), plan(**{"weight_transfer.adapters": "merged"})
    assert not apart.processes and apart.budget is not None and merged.budget is not None
    cache = apart.places["engine/0"].kv_cache_bytes
    assert cache is not None
    weights_gib = (apart.places["engine/0"].memory_gib or 0.0) - cache / 2**30
    assert weights_gib < 1.0, "two sets of adapters, and no base"
    assert merged.budget.peaks_gib[0] > apart.budget.peaks_gib[0] + 12.0


def test_eight_bits_and_rounding_by_chance_are_counted_and_are_for_one_rank() -> None:
    small = {"actor_train.training_args.optim": "adamw_8bit", "actor_train.training_args.stochastic_rounding": True}
    full = {"actor_train.model_args.lora_rank": None}
    made = plan(**full, **small)
    assert made.budget is not None and not made.budget.offloads
    ranks = {"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": [2, 3], "async_generation_ratio": 1}
    for key, value in small.items():
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            plan(4, **full, **ranks, allow_uncorrected_async=True, **{key: value})


def test_models_whose_layers_are_no_plain_products_get_merged_weights(tmp_path: Any) -> None:
    from transformers import GPT2Config, Qwen2Config, Qwen3MoeConfig

    found = []
    for number, config in enumerate(
        (
            Qwen2Config(
                vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
            ),
            GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2),
            Qwen3MoeConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_experts=4),
        )
    ):
        path = tmp_path / str(number)
        config.save_pretrained(path)
        (path / "tokenizer.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"")
        found.append(find_adapter_problem(path))
    assert found == [None, "its layers are no plain linear ones", "it is a mixture of experts"]
