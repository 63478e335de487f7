"""Whole models, empty shapes, and what ends an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from headway.errors import ConfigError
from headway.models.model_loading import (
    count_parameters,
    find_end_tokens,
    load_model,
    load_tokenizer,
    make_architecture_factory,
)


def test_an_architecture_gives_the_same_logits_once_the_weights_are_in(untrained: Path) -> None:
    model, empty = load_model(untrained, torch.float32), make_architecture_factory(untrained)()
    assert {parameter.device.type for name, parameter in empty.named_parameters() if "norm" not in name} == {"meta"}
    assert {buffer.device.type for buffer in empty.buffers()} == {"cpu"}
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        assert torch.equal(empty(ids).logits, model(ids).logits)


def test_tied_tensors_of_an_architecture_are_one_and_every_call_makes_another(untrained: Path) -> None:
    make = make_architecture_factory(untrained)
    first, second = make(), make()
    assert first.get_output_embeddings().weight is first.get_input_embeddings().weight
    assert first is not second
    assert first.config is not second.config
    assert first.generation_config.eos_token_id == json.loads((untrained / "config.json").read_text())["eos_token_id"]


def test_parameters_are_counted_once(untrained: Path) -> None:
    model = load_model(untrained, torch.float32)
    assert count_parameters(untrained) == sum(tensor.numel() for tensor in model.parameters()) == 99_072


def test_the_dtype_and_the_attention_are_those_asked_for(untrained: Path) -> None:
    model = load_model(untrained, torch.bfloat16, attn="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert not model.training


def test_all_that_ends_an_answer_is_found(untrained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(untrained)
    assert find_end_tokens(untrained) == find_end_tokens(tokenizer) == {tokenizer.eos_token_id}
    assert find_end_tokens(tokenizer, GenerationConfig(eos_token_id=[7, 8])) == {tokenizer.eos_token_id, 7, 8}
    given = tmp_path / "given"
    shutil.copytree(untrained, given)
    (given / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert find_end_tokens(given) == {tokenizer.eos_token_id, 5, 6}


def test_what_is_no_model_is_refused_by_everybody(tmp_path: Path) -> None:
    for use in (make_architecture_factory, count_parameters, load_tokenizer, find_end_tokens):
        with pytest.raises(ConfigError, match=r"config\.json"):
            use(tmp_path)
