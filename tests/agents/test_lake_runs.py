"""The seed's FrozenLake configuration, with model and sizes for one machine, through the whole system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.ledger.ledger_records import decode_episode
from tests.agents.factory import lake
from tests.runs.factory import Runs, audit, count, events, gone, hold_after, parts, rows

pytest.importorskip("gymnasium")

ONE_STEP: dict[str, Any] = {"max_steps": 1, "eval_steps": 0, "train_env_manager__group_size_redundancy": 1}


def test_the_seed_trains_validates_is_killed_and_goes_on(runs: Runs, tmp_path: Path) -> None:
    held, opened = hold_after(2, tmp_path)
    run = lake(runs, tmp_path / "run", processes=True, max_steps=4, save_steps=1, track_with="[jsonl]", **held)
    assert run.until(lambda: count(run.directory, "checkpoint") >= 2), run.text
    children = list(parts(run).values())
    run.kill()
    run.end()
    assert gone(children)
    opened.touch()
    again = runs.start(run.directory, "train", str(run.directory), "--resume")
    assert again.end() == 0, again.text
    assert [event.data["trained"] for event in events(run.directory, "step.end")][-1] == 4
    audit(run.directory)

    judged = events(run.directory, "validate.end")[-1].data
    assert judged["trained"] == 4 and judged["samples"] == 3 and {"success", "turns", "invalid"} <= judged.keys()
    metrics = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert any({"episode/turns", "episode/invalid", "reward/train"} <= row.keys() for row in metrics)
    assert any("held_out/success" in row for row in metrics)
    assert "held-out success" in again.text

    evaluated = runs.start(tmp_path / "eval", "eval", str(run.directory), "--json", "--limit", "2", "processes=false")
    assert evaluated.end() == 0, evaluated.text
    result = json.loads(evaluated.text[evaluated.text.index("{") :])
    assert result["domains"]["lake"]["tasks"] == 2 and "success" in result["domains"]["lake"]
    words = (str(run.directory), "--episodes", "2", "--max-steps", "1", "processes=false")
    watched = runs.start(tmp_path / "play", "play", *words)
    assert watched.end() == 0, watched.text
    assert "<user>" in watched.text and watched.text.count("\n[reward ") == watched.text.count("turns 1") == 2


@pytest.mark.parametrize("estimator", ["step_reinforce", "gigpo"])
def test_step_estimators_train_the_first_episodes_to_end(runs: Runs, tmp_path: Path, estimator: str) -> None:
    history = estimator == "step_reinforce"
    run = lake(runs, tmp_path / "run", adv_estimator=estimator, custom_envs__lake__history=history, **ONE_STEP)
    assert run.end() == 0, run.text
    found = [decode_episode(body) for (body,) in rows(run.directory, "SELECT body FROM payloads")]
    trained = events(run.directory, "group.train")
    assert len(trained) == 2 and sum(event.data["samples"] for event in trained) == 4
    ends = rows(run.directory, "SELECT reason FROM samples WHERE end = 'dropped'")
    assert ("surplus_member",) in ends, "one more is started, and given up when the group is full"
    for episode in found:
        assert 1 <= len(episode.turns) <= 3 and episode.info["turns"] == len(episode.turns)
        assert [turn.starts_new_context for turn in episode.turns] == [not history] * len(episode.turns)
        assert all(len(turn.generation.actions) <= 6 for turn in episode.turns)


def test_what_cannot_be_played_is_refused_before_anything_starts(runs: Runs, tmp_path: Path) -> None:
    wrong = {
        "custom_envs__lake__env_type": ("frozen_lak", "did you mean 'frozen_lake'"),
        "custom_envs__lake__env_config__siz": (4, "did you mean 'size'"),
        "custom_envs__lake__agent_template": ("none", "has no {observation}"),
        "custom_envs__lake__env_config__size": (1, "size = 1: must be from 2 to 32"),
    }
    for number, (key, (value, problem)) in enumerate(wrong.items()):
        run = lake(runs, tmp_path / f"{number}", **{key: value})
        assert run.end() == 2 and problem in run.text and "Traceback" not in run.text, run.text
        assert not run.directory.exists()
