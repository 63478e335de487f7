"""The status of a run: how it travels, and how it is shown."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from headway.errors import HeadwayError
from headway.monitor.run_status import (
    EngineStatus,
    RunStatus,
    StageStatus,
    WaitStatus,
    format_engines,
    format_usage,
    make_stage_table,
)


def make_status() -> RunStatus:
    waits = (WaitStatus(on="math", what="reward of sample 3.1", seconds=61.0),)
    stages = (
        StageStatus(role="reward", state="running", seconds=61.0, queue=2, waits=waits),
        StageStatus(role="train", state="degraded", seconds=0.5),
    )
    engines = (EngineStatus(name="engine/0", health="up", version=4, requests=3),)
    return RunStatus(phase="training", trained=4, served=4, steps=9, stages=stages, engines=engines, culprits=("x",))


def show(status: RunStatus, width: int | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(make_stage_table(status.stages, width=width))
    return out.getvalue()


def test_a_status_travels_as_json() -> None:
    status = make_status()
    assert RunStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


@pytest.mark.parametrize("data", [None, [], {}, {"stages": 3}, {**make_status().to_json(), "usage": 3}, {"phase": "x"}])
def test_anything_else_is_refused(data: object) -> None:
    with pytest.raises(HeadwayError, match="not the status of a run"):
        RunStatus.from_json(data)


def test_the_table_has_state_queue_wait_and_since_when() -> None:
    reward, wait, train = show(make_status()).splitlines()
    assert reward.split() == ["●", "reward", "running", "1", "min", "01", "s", "2", "queued"]
    assert wait.rstrip() == "    waits for math: reward of sample 3.1, 1 min 01 s"
    assert train.startswith("! train") and "degraded 0.500 s" in train


def test_a_row_of_the_panel_is_one_line() -> None:
    waits = tuple(WaitStatus(on="math", what="x" * 300, seconds=1.0) for _ in range(3))
    status = RunStatus(
        phase="training", stages=(StageStatus(role="reward", state="running", seconds=1.0, waits=waits),)
    )
    assert len(show(status).splitlines()) > 3
    assert len(show(status, width=80).splitlines()) == 1


def test_engines_that_are_alike_share_a_line() -> None:
    engines = [EngineStatus(name=f"engine/{n}", health="up", version=3, requests=2) for n in range(20)]
    engines.append(EngineStatus(name="engine/20", health="down", version=-1, requests=0))
    many, down = format_engines(engines)
    assert "and 12 more: up, version 3, 40 requests" in many and down == "engine/20: down, version -1, 0 requests"


def test_usage_is_one_line() -> None:
    usage = {"memory/controller_gb": 1.24, "gpu_memory_gb/0": 70.0, "gpu_utilization/0": 0.5, "gpu_allocated_gb/0": 1.0}
    assert format_usage(usage) == "memory in GB: controller 1.2; GPU 0: 70.0 GB, 50% busy"
    assert format_usage({}) == ""
