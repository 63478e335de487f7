"""`headway train --dry-run` tries rewards and environments once, before a run loses hours to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headway.cli import main
from headway.cli.code_trial import try_user_code
from headway.config import load_config
from headway.errors import ConfigError
from headway.launch.training_session import prepare_run

REWARDS = """
def fine(text, row):
    return float(text == row["answer"])

def words(text, row):
    return "good"

def broken(text, row):
    return 1 / 0
"""
ENVIRONMENT = """
import headway
from headway.environments.text_environment import Reply

@headway.register_environment("talkative")
class Talkative:
    instructions = "Say one digit."

    def reset(self, seed, task_data):
        return "1+1=" * 8

    def step(self, text):
        return Reply("", done=True)
"""
SIZES = {"prompt_length": 16, "response_length": 4, "rollout_batch_size": 4, "num_return_sequences_in_group": 4}


def try_code(**options: object) -> list[str]:
    prepared = prepare_run(load_config({"pretrain": "tiny-sums", "processes": False, **SIZES, **options}))
    return asyncio.run(try_user_code(prepared))


def test_a_reward_is_tried_on_the_first_row_with_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    Path("rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 4)
    data = {"actor_train": {"data_args": {"file_name": "rows.jsonl"}}}
    fine, broken = {"reward_fn": "mine.py:fine"}, {"reward_fn": "mine.py:broken"}
    first, second = try_code(**data, rewards={"default": fine, "b": broken})
    assert first == "rewards.default (mine.py:fine) gives 1 for the first row and the text '3'"
    assert second.startswith("note: rewards.b: mine.py:broken raised ZeroDivisionError")
    with pytest.raises(ConfigError, match=r"words returned 'good' \(str\), not a number"):
        try_code(**data, rewards={"a": {"reward_fn": "mine.py:words"}})


def test_an_episode_that_cannot_fit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("place.py").write_text(ENVIRONMENT)
    options = {"plugins": ["place.py"], "rollout_batch_size": 16, "train_env_manager": {"tags": ["talkative"]}}
    with pytest.raises(
        ConfigError, match=r"sequence_length = 20: the first episode of talkative begins with \d+ tokens"
    ):
        try_code(**options)
    found = try_code(**options, sequence_length=256)
    assert found[0].endswith("tokens, an episode at most 256")


def test_a_dry_run_refuses_a_directory_that_the_run_could_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    Path("rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 4)
    sizes = [f"{key}={value}" for key, value in SIZES.items()]
    files = ["actor_train.data_args.file_name=rows.jsonl", "rewards.default.reward_fn=mine.py:fine"]
    words = ["train", "--dry-run", "pretrain=tiny-sums", "processes=false", "output_dir=rows.jsonl", *sizes, *files]
    assert main(words) == 2
    assert "something that is no directory stands there" in capsys.readouterr().err
