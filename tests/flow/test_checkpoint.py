"""Checkpoints: whole or not there, named by the ledger only when they are, and never waited for without end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from headway.config.simulation_config import FaultConfig
from headway.flow.training_flow import AsyncTrainingFlow
from headway.ledger import Ledger
from headway.monitor.event_log import LoggedEvent
from tests.flow.factory import RELIABILITY, audit, make_costs, make_scenario, play_through

SLOW_SAVE = make_costs(trainer=replace(make_costs().trainer, save_s=5.0))


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def last_checkpoint(run_dir: Path) -> tuple[int, str] | None:
    ledger = Ledger(run_dir / "ledger.sqlite")
    try:
        return ledger.last_checkpoint()
    finally:
        ledger.close()


def test_a_checkpoint_is_written_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    played = play_through(make_scenario(max_steps=5, save_steps=2), tmp_path)
    assert [event.data["trained"] for event in played.of("checkpoint")] == [2, 4, 5]
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert last_checkpoint(tmp_path) == (5, "checkpoints/step-00000005")


def test_without_further_steps_no_second_one_is_written(tmp_path: Path) -> None:
    played = play_through(make_scenario(max_steps=4, save_steps=2), tmp_path)
    assert [event.data["trained"] for event in played.of("checkpoint")] == [2, 4]


def test_it_holds_what_the_trainer_needs_to_go_on(tmp_path: Path) -> None:
    played = play_through(make_scenario(max_steps=2), tmp_path)
    state = json.loads((tmp_path / "checkpoints" / "step-00000002" / "trainer.json").read_text())
    assert (state["version"], state["samples"]) == (2, 4)
    assert state["lineage"] == played.flow.backends.trainer.lineage  # type: ignore[attr-defined]


def test_a_run_killed_while_one_is_written_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """What is on the disk at that moment is copied, as a kill would leave it."""
    copy = tmp_path / "killed"
    flows: list[AsyncTrainingFlow] = []

    def kill(event: LoggedEvent) -> None:
        if event.kind == "request.end" and not copy.exists() and list(tmp_path.glob("run/checkpoints/*4.partial")):
            shutil.copytree(tmp_path / "run", copy)

    scenario = make_scenario(costs=SLOW_SAVE, async_generation_ratio=1, max_steps=6, save_steps=2)
    play_through(scenario, tmp_path / "run", prepare=flows.append, on_event=kill)
    assert checkpoints(copy) == ["step-00000002", "step-00000004.partial"]
    played = play_through(scenario, copy)
    assert played.summary.finished
    assert [event.data["trained"] for event in played.of("step.end")] == [3, 4, 5, 6]
    assert "step-00000004.partial" not in checkpoints(copy)
    assert audit(copy)["trained"] == 12


def test_a_trainer_that_hangs_while_it_saves_is_lost_at_its_deadline(tmp_path: Path) -> None:
    fault = FaultConfig(kind="hang", target="trainer", at_s=6.0)
    played = play_through(make_scenario(fault, costs=SLOW_SAVE, max_steps=4, save_steps=2), tmp_path)
    assert played.summary.finished and played.summary.restarts == 1
    assert audit(tmp_path)["trained"] == 8


def test_a_stop_while_the_trainer_hangs_ends_all_the_same(tmp_path: Path) -> None:
    flows: list[AsyncTrainingFlow] = []

    def stop(event: LoggedEvent) -> None:
        if event.time_s > 4.0:
            flows[0].stop()

    fault = FaultConfig(kind="hang", target="trainer", at_s=3.5)
    scenario = make_scenario(fault, async_generation_ratio=1, max_steps=9)
    played = play_through(scenario, tmp_path, prepare=flows.append, on_event=stop)
    assert not played.summary.finished
    assert played.events[-1].time_s < 4.0 + 3 * RELIABILITY.train_timeout_s
    assert audit(tmp_path)["open"] == 0


def test_a_trainer_that_hangs_while_it_is_loaded_is_restarted(tmp_path: Path) -> None:
    play_through(make_scenario(max_steps=2), tmp_path)
    hang = FaultConfig(kind="hang", target="trainer", at_s=1.0)
    played = play_through(make_scenario(hang, costs=SLOW_SAVE, max_steps=4), tmp_path)
    assert played.summary.finished and played.summary.trained == 4
    assert len(played.of("restart", who="trainer")) == 1


def test_a_checkpoint_that_cannot_be_written_at_the_end_is_an_event_and_the_last_one_stands(tmp_path: Path) -> None:
    healthy = play_through(make_scenario(costs=SLOW_SAVE, max_steps=4, save_steps=3), tmp_path / "healthy")
    end_s = healthy.of("step.end")[-1].time_s
    fault = FaultConfig(kind="crash", target="trainer", at_s=end_s + 1.0)
    played = play_through(make_scenario(fault, costs=SLOW_SAVE, max_steps=4, save_steps=3), tmp_path / "crash")
    assert [event.data["trained"] for event in played.of("checkpoint")] == [3]
    assert played.of("error", error="TrainerCrashed")
    again = play_through(make_scenario(costs=SLOW_SAVE, max_steps=4, save_steps=3), tmp_path / "crash")
    assert again.summary.trained == 4 and audit(tmp_path / "crash")["trained"] == 8


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_damaged_checkpoint_is_said_to_be_one(damage: str, tmp_path: Path) -> None:
    play_through(make_scenario(max_steps=2), tmp_path)
    spoil(tmp_path, 2, damage)
    played = play_through(make_scenario(max_steps=4), tmp_path)
    assert not played.summary.finished
    assert "none of its checkpoints can be read" in played.summary.reason
    assert "holds no checkpoint of this trainer" in played.summary.reason
    assert audit(tmp_path)["open"] == 0


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_damaged_checkpoint_is_passed_over_where_there_is_one_before_it(damage: str, tmp_path: Path) -> None:
    play_through(make_scenario(max_steps=4, save_steps=2), tmp_path)
    spoil(tmp_path, 4, damage)
    played = play_through(make_scenario(max_steps=6, save_steps=2), tmp_path)
    assert [event.data["trained"] for event in played.of("step.end")] == [3, 4, 5, 6]
    assert any("step 4 cannot be read and is passed over" in event.data["message"] for event in played.of("error"))
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]
    assert audit(tmp_path)["trained"] == 12


def spoil(run_dir: Path, step: int, damage: str) -> None:
    file = run_dir / "checkpoints" / f"step-{step:08d}" / "trainer.json"
    file.unlink() if damage == "missing" else file.write_text("{")
