"""Architectures whose tokens meet elsewhere than in attention are refused before they compute something wrong."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from headway.errors import ConfigError
from headway.models.suitability import check_attention

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def made(kind: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | options)))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral", "qwen3"])
def test_full_and_sliding_attention_will_do(kind: str) -> None:
    check_attention(made(kind))


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of conv"),
        ("llama4_text", {"num_local_experts": 2}, "layers of chunked_attention"),
        ("recurrent_gemma", {}, "recurrent layers"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "attention cannot be replaced"),
    ],
)
def test_what_mixes_tokens_in_another_way_is_refused_by_name(kind: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"ForCausalLM cannot be used here: .*{problem}"):
        check_attention(made(kind, **options))
