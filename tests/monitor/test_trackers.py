"""Trackers: what they write, that resumed runs append, and that none of them can hurt a run."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.monitor.event_log import LoggedEvent
from headway.monitor.scalar_series import ScalarPoint
from headway.monitor.tracker_writers import METRICS_FILE, read_metrics
from headway.monitor.trackers import Tracker, make_trackers

from .factory import ev, resumed_run, training_run


def track(names: list[str], directory: Path, events: list[LoggedEvent]) -> list[Tracker]:
    trackers = make_trackers(names, directory, project="project", config={"seed": 3})
    for event in events:
        for tracker in trackers:
            tracker(event)
    for tracker in trackers:
        tracker.close()
    assert [tracker.failure for tracker in trackers] == [""] * len(trackers)
    return trackers


def in_two_processes(names: list[str], directory: Path) -> None:
    """A run that was killed at step 12 and went on from step 10, up to step 18."""
    events = resumed_run(first=12, back_to=10, then=8)
    second = max(place for place, event in enumerate(events) if event.kind == "run.begin")
    track(names, directory, events[:second])
    track(names, directory, events[second:])


def metrics(directory: Path) -> dict[int, dict[str, float | None]]:
    return read_metrics((directory / METRICS_FILE).read_text(encoding="utf-8").splitlines())


def test_json_lines_hold_every_step_and_its_held_out_reward(tmp_path: Path) -> None:
    track(["jsonl"], tmp_path, training_run(steps=6, eval_steps=3))
    found = metrics(tmp_path)
    assert list(found) == list(range(7))
    assert [step for step, values in found.items() if "reward/held_out" in values] == [0, 3, 6]
    assert found[6]["train/learning_rate"] == 1e-5


def test_json_lines_of_lost_steps_are_replaced(tmp_path: Path) -> None:
    in_two_processes(["jsonl"], tmp_path)
    lines = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    elevens = [row["reward/train"] for row in map(json.loads, lines) if row.get("step") == 11]
    assert len(elevens) == 2
    found = metrics(tmp_path)
    assert found[11]["reward/train"] == elevens[1]
    assert sorted(found) == list(range(19))


def test_json_lines_survive_a_torn_line_and_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step":1,"a":1}\n{"step":2,"a"', encoding="utf-8")
    track(["jsonl"], tmp_path, [ev(1, "step.end", "train", trained=3, **{"train/loss": float("inf")})])
    assert metrics(tmp_path) == {1: {"a": 1}, 3: {"time_s": 1.0, "time/step_s": 0.0, "train/loss": None}}


def test_tensorboard_reads_back_one_value_a_step_also_after_a_crash(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    in_two_processes(["tensorboard", "jsonl"], tmp_path)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rewards = {row.step: row.value for row in accumulator.Scalars("reward/train")}
    assert len(accumulator.Scalars("reward/train")) == 18
    expected = {step: values["reward/train"] for step, values in metrics(tmp_path).items() if step}
    assert rewards == pytest.approx(expected)
    assert [row.step for row in accumulator.Scalars("reward/held_out")] == [0, 5, 10, 15]


class Recorded:
    """What a service was told: the one place where a stand-in is used, because the service is not ours."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Recorded:
            self.calls.append((name, args, options))
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for called, args, options in self.calls if called == name]


def installed(monkeypatch: pytest.MonkeyPatch, name: str) -> Recorded:
    module, recorded = ModuleType(name), Recorded()
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.init = recorded.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return recorded


def test_wandb_goes_on_with_the_same_run_and_draws_over_the_trained_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = installed(monkeypatch, "wandb")
    in_two_processes(["wandb"], tmp_path)
    first, second = (options for _, options in recorded.named("init"))
    assert first == second
    assert first["resume"] == "allow" and first["project"] == "project" and first["config"] == {"seed": 3}
    assert ((("*",), {"step_metric": "trained"})) in recorded.named("define_metric")
    logged = [args[0] for args, _ in recorded.named("log")]
    assert [row["trained"] for row in logged if "reward/train" in row] == [*range(1, 13), *range(11, 19)]
    assert len(recorded.named("finish")) == 2


def test_trackio_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = installed(monkeypatch, "trackio")
    in_two_processes(["trackio"], tmp_path)
    first, second = (options for _, options in recorded.named("init"))
    assert first == second and first["resume"] == "allow" and first["name"].startswith(tmp_path.name)
    steps = [options["step"] for args, options in recorded.named("log") if "reward/train" in args[0]]
    assert steps == [*range(1, 13), *range(11, 19)]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "swanlab"])
def test_a_package_that_is_missing_is_said_with_how_to_get_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None)
    with pytest.raises(ConfigError, match=f"track_with = '{name}': .*not installed.*pip install {name}"):
        make_trackers(["jsonl", name], tmp_path / "run", project="p", config={})
    assert not (tmp_path / "run").exists()


def test_a_tracker_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are tensorboard, wandb, trackio, mlflow, swanlab, jsonl"):
        make_trackers(["tensorbord"], tmp_path, project="p", config={})


def test_a_service_that_does_not_start_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise PermissionError("no account")

    installed(monkeypatch, "wandb")
    monkeypatch.setattr("wandb.init", refuse)
    with pytest.raises(ConfigError, match="does not start: PermissionError: no account"):
        make_trackers(["wandb"], tmp_path, project="p", config={})


class FullDisk:
    """A writer that fails from some point on, and counts how often it was asked."""

    def __init__(self, good: int) -> None:
        self.good = good
        self.asked = 0

    def write(self, point: ScalarPoint) -> None:
        self.asked += 1
        if self.asked > self.good:
            raise OSError("no space left on device")

    def close(self) -> None:
        self.asked += 1


def test_a_tracker_that_fails_is_reported_once_and_switched_off() -> None:
    writer, said = FullDisk(good=3), list[str]()
    tracker = Tracker("tensorboard", writer, said.append)
    for event in training_run(steps=8):
        tracker(event)
    tracker.close()
    assert said == ["tensorboard: tracking is switched off for the rest of the run (OSError: no space left on device)"]
    assert writer.asked == 4


def test_a_name_given_twice_is_one_tracker(tmp_path: Path) -> None:
    assert len(make_trackers(["jsonl", "jsonl"], tmp_path, project="p", config={})) == 1
