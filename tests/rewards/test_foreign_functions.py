"""Functions of other systems' kinds are called as they expect, and judged like our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.errors import ConfigError, RewardError
from headway.rewards.base import Reward
from headway.rewards.reward_registry import make_reward, make_rewards
from tests.rewards.factory import judged, scored

FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "seen": len(data_source) + len(extra_info or {})}

def short_score(solution_str, ground_truth, bonus=0.0):
    return (solution_str == ground_truth) + bonus

def batch_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [{"score": float(said == wanted)} for said, wanted in zip(solution_strs, ground_truths, strict=True)]

def right(completions, answer, **kwargs):
    return [float(said == wanted) for said, wanted in zip(completions, answer, strict=True)]

def chatty(prompts, completions):
    return [prompts[0][-1]["content"] + "!" == said[0]["content"] for said in completions]

async def later(completions, **columns):
    return [float(len(columns["level"]) == 1) for _ in completions]

def two(completions):
    return [1.0, 2.0]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "theirs.py").write_text(FUNCTIONS)
    return tmp_path / "theirs.py"


def made(file: Path, name: str, answer: str | None = None, **arguments: Any) -> Reward:
    return make_reward(f"{file}:{name}", arguments, answer=answer)


def test_verl_gets_source_solution_and_truth(file: Path) -> None:
    reward = made(file, "compute_score")
    row = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"index": 3}}
    assert scored(reward, "7", **row).value == 1 and scored(reward, "7", **row).parts == {"seen": 6}
    assert judged(reward, "8", **row) == 0
    assert [judged(made(file, "batch_score"), text, **row) for text in ("7", "8")] == [1, 0], "lists of one"
    assert judged(made(file, "short_score", "solution", bonus=0.5), "7", solution="7") == 1.5, "the column of the run"


def test_trl_gets_lists_of_one_with_the_columns_it_asks_for(file: Path) -> None:
    assert [judged(made(file, "right"), text, prompt="3+4=", answer="7", more=1) for text in ("7", "8")] == [1, 0]
    messages = [{"role": "user", "content": "hey"}]
    assert judged(made(file, "chatty"), "hey!", prompt=messages, answer="") == 1
    assert judged(made(file, "later"), "x", level=3) == 1


def test_what_they_return_is_judged_as_ever(file: Path) -> None:
    with pytest.raises(RewardError, match=r"two returned \[1\.0, 2\.0\] \(list\), not a number"):
        judged(made(file, "two"), "x")
    with pytest.raises(RewardError, match="short_score raised KeyError: 'answer'"):
        judged(made(file, "short_score"), "x")


def test_an_argument_that_they_do_not_take_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'bonsu'"):
        made(file, "short_score", bonsu=1)


def test_a_file_that_is_not_there_is_said_once_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config({"rewards": {"mine": {"reward_fn": "absent.py:f"}}}).config
    with pytest.raises(ConfigError) as caught:
        make_rewards(config.rewards)
    assert str(caught.value) == f"rewards.mine.reward_fn = 'absent.py:f': there is no such file in {tmp_path}"
