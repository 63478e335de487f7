"""The page on data shows what works, and every key of `data_args`."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from headway.config import TrainingDataArgs, load_config
from headway.data import make_sources
from headway.data.data_entries import SCHEMES
from headway.data.data_files import READERS
from headway.rewards.reward_registry import make_rewards
from tests.data_sources.factory import Characters, epoch, sums, text_of, write

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_configuration_on_the_page_works(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    found = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    given = yaml.safe_load(found[1])
    rows = [{"question": row["prompt"], "answer": row["answer"]} for row in sums(400)]
    write(tmp_path / "gsm8k_train.jsonl", rows)
    given["actor_train"]["data_args"]["dataset_dir"] = str(tmp_path)
    given["actor_train"]["data_args"]["options"]["reasoning_gym:chain_sum"]["size"] = 50
    resolved = load_config(given)
    made = make_sources(resolved, Characters())
    assert make_rewards(resolved.config.rewards) is not None
    assert len(epoch(made.validation)) == 200
    assert {task.domain for task in epoch(made.train)} == {"gsm8k_train", "reasoning_gym"}
    assert text_of(made.train.task(0)).endswith("\nEnd with #### and the number.<a>")


def test_every_key_and_every_kind_of_entry_is_on_the_page() -> None:
    for name in (
        [field.name for field in fields(TrainingDataArgs)] + list(READERS) + [f"{scheme}:" for scheme in SCHEMES]
    ):
        assert f"`{name}" in PAGE or f"{name}`" in PAGE, name
