"""The model that tests train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.errors import ConfigError
from headway.models.model_loading import load_model, load_tokenizer
from headway.models.model_names import resolve_model
from headway.models.tiny_model import make_tiny_model

PROBLEMS = [(a, b) for a in range(10) for b in range(10)]


def test_the_same_seed_gives_the_same_weights_and_leaves_the_world_s_dice_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, seed=seed, steps=2)
    assert torch.equal(torch.rand(1), expected)
    content = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert content["a"] == content["b"] != content["c"]


def test_its_tokens_are_characters_and_chats_go_through_its_template(untrained: Path) -> None:
    tokenizer = load_tokenizer(untrained)
    text = "What is 3 + 5?\n"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+5="}]
    written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert written == "<begin><system>Add.<end><user>3+5=<end><assistant>"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert len(ids) == 1 + (1 + 4 + 1) + (1 + 4 + 1) + 1
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_an_alphabet_that_cannot_write_sums_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="alphabet"):
        make_tiny_model(tmp_path, alphabet="0123456789")


def test_tiny_sums_answers_in_form_and_is_right_now_and_then(tmp_path: Path) -> None:
    directory = resolve_model("tiny-sums", tmp_path)
    assert resolve_model("tiny-sums", tmp_path) == directory
    tokenizer, model = load_tokenizer(directory), load_model(directory, torch.float32)
    chats = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in PROBLEMS]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    with torch.no_grad():
        made = model.generate(**prompts, max_new_tokens=4, do_sample=True, num_return_sequences=8)
    answers = tokenizer.batch_decode(made[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    wanted = [str(a + b) for a, b in PROBLEMS for _ in range(8)]
    assert sum(answer.isdigit() and int(answer) <= 18 for answer in answers) > 0.7 * len(answers)
    right = sum(answer == want for answer, want in zip(answers, wanted, strict=True)) / len(answers)
    assert 0.06 < right < 0.2
