"""Reward models with processes of their own: they score what they would score alone, are killed and come back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.runs.factory import Run, Runs, audit, count, events, parts, rows

MODEL_REWARD: dict[str, Any] = {
    "processes": True,
    "max_steps": 16,
    "save_steps": 0,
    "reliability.restart_backoff_s": 0,
    "actor_train.device_mapping": "[0]",
    "actor_infer.device_mapping": "[1]",
    "rewards.arithmetic.reward_fn": "reward_model",
    "rewards.arithmetic.tag_included": "addition",
    "rewards.arithmetic.device_mapping": "[2]",
}


def start(runs: Runs, directory: Path, **changed: Any) -> Run:
    options = {**MODEL_REWARD, **changed}
    return runs.train(directory, **{key.replace(".", "__"): value for key, value in options.items()})


def check_whole(run: Run, steps: int) -> None:
    """Nothing is lost and nothing is counted twice."""
    audit(run.directory)
    (ended,) = events(run.directory, "run.end")
    assert ended.data["trained"] == steps and ended.data["finished"], run.text
    started = [event.data["sample"] for event in events(run.directory, "score.start")]
    assert len(started) == len(set(started)), "each sample is scored once"
    assert not rows(run.directory, "SELECT reason FROM samples WHERE reason = 'reward_failed'")


def test_a_policy_is_trained_against_a_reward_model_that_is_killed(runs: Runs, tmp_path: Path) -> None:
    model = tmp_path / "reward"
    assert runs.template.call("tests.runs.factory:make_reward_model", str(model)) == 0
    run = start(runs, tmp_path / "run", reward_pretrain=str(model))
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text
    killed = parts(run)["reward-arithmetic"]
    os.kill(killed, signal.SIGKILL)
    assert run.end() == 0, run.text
    check_whole(run, 16)
    seen = [(event.kind, event.who) for event in events(run.directory, "down", "up")]
    assert seen == [("down", "reward/arithmetic"), ("up", "reward/arithmetic")]
    (down,) = events(run.directory, "down")
    assert "SIGKILL" in down.data["reason"]
    assert runs.template.call("tests.runs.test_reward_models:check_scores", str(run.directory), str(model)) == 0


def check_scores(directory: str, model: str) -> None:
    """Every score in the ledger is what `transformers` alone gives for the conversation."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    judge, tokenizer = AutoModelForSequenceClassification.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    lines = [json.loads(line) for line in (Path(directory) / "samples.jsonl").open()]
    assert lines
    for line in lines:
        conversation = [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["answer"]},
        ]
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            expected = float(judge(input_ids=ids).logits[0, 0])
        assert abs(line["reward"] - expected) < 1e-4, (line, expected)


def test_a_judge_that_the_run_serves_gives_verdicts_and_comes_back(runs: Runs, tmp_path: Path) -> None:
    """The judge is noise, of which the last digit is the score; two copies of it have a device each."""
    judge = {
        "rewards.arithmetic.reward_fn": "judge",
        "rewards.arithmetic.model_args.model_name_or_path": str(runs.model),
        "rewards.arithmetic.reward_args": r"{template: '{question}{answer}', pattern: '([0-9])', highest: 9, "
        "temperature: 4, max_tokens: 30, retries: 40, pause_s: 0, concurrency: 4}",
        "rewards.arithmetic.device_mapping": "[2, 3]",
    }
    run = start(runs, tmp_path / "run", **{**judge, "max_steps": 12})
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text
    os.kill(parts(run)["reward-arithmetic-1"], signal.SIGKILL)
    assert run.end() == 0, run.text
    check_whole(run, 12)
    downs = [event.who for event in events(run.directory, "down")]
    assert downs == ["reward/arithmetic/1"]
    scores = [json.loads(line)["reward"] for line in (run.directory / "samples.jsonl").open()]
    assert all(0 <= score <= 1 for score in scores) and len(set(scores)) > 1
