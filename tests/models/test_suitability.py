"""Which architectures share a forward pass among sequences, and which compute one sequence after the other."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import ConfigError
from headway.models.model_checks import check_attention, check_rotation, find_attention_problem
from tests.trainers.factory import small


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral", "qwen3"])
def test_full_and_sliding_attention_is_shared(kind: str) -> None:
    assert find_attention_problem(small(kind)) is None


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of conv"),
        ("llama4_text", {"num_local_experts": 2}, "layers of chunked_attention"),
        ("recurrent_gemma", {}, "recurrent layers"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "attention cannot be replaced"),
        ("nemotron", {}, "do not pass on"),
        ("diffllama", {}, "more than once"),
    ],
)
def test_what_mixes_tokens_in_another_way_is_found_and_not_cut_over_ranks(
    kind: str, options: dict[str, Any], problem: str
) -> None:
    model = small(kind, **options)
    assert problem in (find_attention_problem(model) or "")
    with pytest.raises(ConfigError, match=f"ForCausalLM is trained on one device: .*{problem}"):
        check_attention(model)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}


def test_a_rotation_that_changes_with_the_longest_sequence_is_refused_beyond_that_length() -> None:
    config = small("phi3", rope_parameters=LONG, original_max_position_embeddings=16).config
    check_rotation(config, 16)
    with pytest.raises(ConfigError, match="sequence_length = 17: phi3 rotates positions by longrope"):
        check_rotation(config, 17)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "opt"])
def test_rotations_that_are_a_table_go_on_for_any_length(kind: str) -> None:
    model = small(kind, **({"ffn_dim": 32, "word_embed_proj_dim": 32} if kind == "opt" else {}))
    check_rotation(model.config, 1_000_000)
