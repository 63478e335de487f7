"""The benchmark of agents: it runs, and what it compares with is what can be said with pencil and paper."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.agentic import many_episodes
from benchmarks.agentic.__main__ import measure_pace
from benchmarks.agentic.delayed_environment import DelayedEnvironment
from benchmarks.agentic.measured_runs import MEASURED_ROWS, AgenticScenario, MeasuredRow, make_config
from benchmarks.agentic.prediction import CostCalibration, predict_costs

from headway.errors import ConfigError
from headway.sim.virtual_clock import run_on_virtual_clock as run_virtually

pytest.importorskip("gymnasium")
STEADY = AgenticScenario(groups=2, members=3, turns=4, mean_s=1.0, std_s=0.0, steps=3)
KNOWN = CostCalibration(engine_s=0.1, train_s=2.0, update_s=0.5, tokens=(2, 2), turns=(STEADY.turns,))
BARRIER, FREE, ASYNC, REDUNDANT = MEASURED_ROWS


def step_s(sizes: AgenticScenario, row: MeasuredRow, known: CostCalibration = KNOWN) -> float:
    return predict_costs(sizes, row, make_config(sizes, row, "tiny-sums", Path("nowhere")), known, [0]).step_s


def test_the_simulator_says_what_can_be_said_with_pencil_and_paper() -> None:
    played = STEADY.turns * (1.0 + 2 * 0.1)
    assert step_s(STEADY, BARRIER) == pytest.approx(played + 2.0 + 0.5)
    assert step_s(STEADY, FREE) == pytest.approx(played + 2.0 + 0.5)
    assert step_s(STEADY, ASYNC) < played, "two batches of slots, and training behind playing"
    spread = replace(STEADY, std_s=1.0)
    times = [step_s(spread, row) for row in MEASURED_ROWS]
    assert times == sorted(times, reverse=True), "each waits for less than the one before"
    hanging = replace(spread, hang=0.01, timeout_s=60.0)
    gain, gain_of_hangs = times[2] / times[3], step_s(hanging, ASYNC) / step_s(hanging, REDUNDANT)
    assert gain_of_hangs > gain, "redundancy is worth more where some never answer"


def test_a_slow_environment_is_the_same_environment_later() -> None:
    async def scenario() -> tuple[float, bool, bool]:
        lake = {"size": 2, "p": 1.0, "is_slippery": False}
        slow = DelayedEnvironment(mean_s=10.0, std_s=0.0, env_config=lake)
        assert (await slow.reset(3, {})).text == "P_\n_G" and slow.reusable  # type: ignore[attr-defined]
        await slow.step("right")
        reply, now_s = await slow.step("down"), asyncio.get_running_loop().time()
        never = DelayedEnvironment(mean_s=0.0, std_s=0.0, hang=1.0, env_config=lake)
        await never.reset(3, {})
        try:
            await asyncio.wait_for(never.step("right"), 1000.0)
        except TimeoutError:
            return now_s, bool(reply.success), True
        return now_s, bool(reply.success), False

    assert run_virtually(scenario()) == (20.0, True, True)


def test_rows_run_and_stand_beside_their_prediction(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from headway.models.tiny_model import make_tiny_model

    make_tiny_model(tmp_path, steps=0)
    sizes = AgenticScenario(groups=1, members=2, turns=2, tokens=1, mean_s=0.01, std_s=0.01, steps=1, spare_members=1)
    rows = (FREE, REDUNDANT)
    lines, known = measure_pace(sizes, str(tmp_path), seeds=1, rows=rows, processes=False)
    assert [line.name for line in lines] == [row.name for row in rows] and lines[0].ratio == 1.0
    assert all(line.measured.step_s > 0 and line.predicted.step_s > 0 for line in lines)
    assert set(known.turns) == {2} and known.train_s > 0 and known.engine_s > 0


def test_sizes_that_leave_nothing_to_measure_are_refused() -> None:
    for wrong in ({"warmup": 0}, {"members": 0}, {"steps": 0}, {"mean_s": -1.0}, {"hang": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            AgenticScenario(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", many_episodes.STEP_KINDS)
def test_episodes_leave_nothing_behind(way: str) -> None:
    found = many_episodes.measure_episodes(way, at_once=16, ended=48, turns=2, wait_s=0.01)
    assert found.most == 16 and found.ended == 48 and len(found.snapshots) == 3
    assert all(look.episodes == 0 for look in found.snapshots)
    assert found.snapshots[0].tasks == found.snapshots[-1].tasks
