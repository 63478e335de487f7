"""Rows of data files reach the environments."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headway.data import DataSources
from headway.environments.text_episode import SEED_KEY
from headway.errors import ConfigError
from headway.launch.environment_pool import make_environment_pool, make_episode_sources
from headway.types import Task
from tests.agents.factory import lake
from tests.agents.test_environment_pool import POLICY, resolved
from tests.runs.factory import Runs, events

ONE_TAG = {"train_env_manager.tags": ["easy"], "train_env_manager.num_groups_partition": []}


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sources(*names: str, **changed: Any) -> DataSources:
    return make_episode_sources(resolved(**{"actor_train.data_args.file_name": list(names), **changed}), POLICY)


def tasks(source: Any, count: int) -> list[Task]:
    return [found for found in map(source.task, range(count)) if found is not None]


def test_a_pass_gives_every_row_once_and_keeps_some_from_training(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", *({"secret": number} for number in range(10)))
    made = sources(file, **ONE_TAG, **{"actor_train.data_args.holdout": 4, "val_batch_size": 3})
    assert made.validation is not None and len(made.validation) == 3
    held_out = [task.data["secret"] for task in tasks(made.validation, 9)]
    first, second = ([task.data["secret"] for task in tasks(made.train, 12)][part : part + 6] for part in (0, 6))
    assert len(held_out) == 3 and sorted(first) == sorted(second) and len(set(first)) == 6
    assert not set(first) & set(held_out)
    seeds = {task.data[SEED_KEY] for task in tasks(made.train, 12)}
    assert len(seeds) == 12, "the same row begins otherwise in the next pass"
    other = written(tmp_path / "rows.jsonl", *({"secret": number} for number in range(1, 11)))
    assert sources(other, **ONE_TAG).train.fingerprint() != sources(**ONE_TAG).train.fingerprint()


def test_rows_go_to_their_tag_and_tags_without_rows_are_played_from_seeds(tmp_path: Path) -> None:
    hard = written(tmp_path / "hard.jsonl", {"secret": 1, "seed": 5}, {"secret": 2, "seed": 5})
    made = sources(hard, **{"validation.data_args.file_name": [hard], "val_batch_size": 6})
    found = tasks(made.train, 40)
    assert Counter(task.domain for task in found) == {"easy": 30, "hard": 10}
    assert {task.data[SEED_KEY] for task in found if task.domain == "hard"} == {5}, "a row's own seed is taken"
    assert {"secret" in task.data for task in found if task.domain == "easy"} == {False}
    assert Counter(task.domain for task in tasks(made.validation, 9)) == {"easy": 3, "hard": 2}
    assert made.notes == ("validation.data_args: 2 of 2 prompts are also trained on",)
    alone = sources(hard, **{"train_env_manager.tags": ["hard"], "train_env_manager.num_groups_partition": []})
    assert alone.validation is None, "nothing was held out"


def test_reset_is_given_the_row_and_nothing_of_the_run(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", {"secret": 1, "prompt": "unused", "seed": 3})
    config = resolved(
        **{**ONE_TAG, "actor_train.data_args.file_name": [file], "train_env_manager.tags": ["told"]},
        **{"custom_envs.told.env_type": "tests.environments.sample_environments:Async"},
    )

    async def scenario() -> str:
        pool, task = make_environment_pool(config, POLICY), make_episode_sources(config, POLICY).train.task(0)
        assert task is not None
        episode = pool(task)
        try:
            seen = await episode.reset(task)
            return str(POLICY.tokenizer.decode(seen.tokens))
        finally:
            await episode.close()
            await pool.close()

    assert "seed 3 ['prompt', 'secret']" in asyncio.run(scenario())


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"tag": "esy"}, "belongs to 'esy', and the run plays easy, hard"),
        ({"secret": 1}, "belongs to 'rows', and the run plays easy, hard"),
        ({"tag": "easy", "held_out": 1}, "the column 'held_out' is the run's own"),
        ({"tag": "easy", "seed": 1.5}, "seed 1.5 is no whole number"),
    ],
)
def test_rows_that_cannot_be_played_are_refused_with_their_place(tmp_path: Path, row: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"rows.jsonl:2: {problem}"):
        sources(written(tmp_path / "rows.jsonl", {"tag": "easy"}, row))


def test_options_that_mean_nothing_here_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", {"tag": "easy"})
    with pytest.raises(ConfigError, match="num_groups_partition"):
        sources(file, **{"actor_train.data_args.domain_interleave_probs": {"easy": 1.0}})
    with pytest.raises(ConfigError, match="rows to validate on and none to train on"):
        sources(**{"validation.data_args.file_name": [file]})


def test_a_run_walks_over_the_lakes_of_a_file(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    file = written(tmp_path / "lakes.jsonl", *({"map": ["SF", "FG"], "number": number} for number in range(4)))
    data = {"actor_train.data_args.file_name": f"[{file}]", "actor_train.data_args.holdout": 1}
    run = lake(runs, tmp_path / "run", max_steps=1, eval_steps=1, **data)
    assert run.end() == 0, run.text
    assert [event.data["samples"] for event in events(run.directory, "validate.end")] == [1, 1]
