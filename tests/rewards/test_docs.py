"""The page about rewards tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from headway.config import RewardConfig
from headway.rewards.reward_registry import BUILT_IN_REWARDS, make_reward, make_rewards
from tests.rewards.factory import judged, scored

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_function_on_the_page_is_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text(block("python"))
    reward = make_reward(f"{file}:brevity", {"limit": 2})
    assert judged(reward, "it is 42 indeed", answer="42") == 0.5
    assert scored(reward, "42", answer="42").parts == {"words": 1.0}


def test_the_configuration_on_the_page_works() -> None:
    entries = yaml.safe_load(block("yaml"))["rewards"]
    rewards = {name: RewardConfig(**entry) for name, entry in entries.items()}
    assert make_rewards(rewards) is not None


def test_every_built_in_reward_is_on_the_page() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert set(BUILT_IN_REWARDS) == rows
