"""Models with one number as their output: batches change nothing, what is too long is refused, heads are checked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from headway.errors import ConfigError, RewardError
from headway.models.sequence_classifier import SequenceClassifier, find_classifier_head, load_classifier
from tests.runs.factory import make_model, make_reward_model

TEXTS = ["4", "17 and a lot more of it", "", "x" * 60, "12"]


def conversation(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_a_batch_gives_what_each_conversation_gives_alone(head: str, tmp_path: Path) -> None:
    make_reward_model(str(tmp_path), head)
    served = SequenceClassifier.load(tmp_path, dtype=torch.float32, device="cpu", batch_tokens=160)

    async def score_all() -> list[float]:
        return await asyncio.gather(*(served.score(conversation(text)) for text in TEXTS))

    model, tokenizer = load_classifier(tmp_path, torch.float32, "cpu"), served._tokenizer
    expected = []
    for text in TEXTS:
        rendered = str(tokenizer.apply_chat_template(conversation(text), tokenize=False))
        logits = model(input_ids=torch.tensor([tokenizer.encode(rendered, add_special_tokens=False)])).logits
        expected.append(float(logits.flatten()[-1]))
    assert asyncio.run(score_all()) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(TEXTS) and 1 < served.batches < len(TEXTS)


def test_what_is_longer_than_the_model_can_read_is_refused(tmp_path: Path) -> None:
    make_reward_model(str(tmp_path))
    served = SequenceClassifier.load(tmp_path, dtype=torch.float32, device="cpu", batch_tokens=4096)
    with pytest.raises(RewardError, match="reads at most 256"):
        asyncio.run(served.score(conversation("x" * 300)))


def test_a_model_without_a_template_reads_question_and_answer(tmp_path: Path) -> None:
    make_reward_model(str(tmp_path))
    served = SequenceClassifier.load(tmp_path, dtype=torch.float32, device="cpu", batch_tokens=4096)
    served._tokenizer.chat_template = None
    pair = served._tokenizer("2+2=", "4")["input_ids"]
    assert list(served._encode(conversation("4"))["input_ids"]) == list(pair)


def test_other_heads_are_refused(tmp_path: Path) -> None:
    make_model(str(tmp_path / "causal"))
    with pytest.raises(ConfigError, match="reward_fn: judge"):
        find_classifier_head(tmp_path / "causal")
    make_reward_model(str(tmp_path / "two"))
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    config |= {"num_labels": 2, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="gives 2 numbers"):
        find_classifier_head(tmp_path / "two")
