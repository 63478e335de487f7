"""What a hostile reading found: worlds in which one part misbehaves in a way that used to cost the whole run."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from headway.cluster.base import ResourceLock
from headway.config.simulation_config import (
    DistributionConfig,
    FaultConfig,
    SimulatedEnvironmentConfig,
    SimulatedWeightsConfig,
)
from headway.config.simulation_config import SimulatedTrainerConfig as TrainerCost
from headway.engines.base import Progress, Request
from headway.errors import EngineCrashed, EngineError
from headway.flow.training_flow import AsyncTrainingFlow
from headway.monitor.wait_graph import WaitGraph
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.simulated_trainer import SimulatedTrainer
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import Batch, FinishReason
from tests.flow.factory import RELIABILITY, make_costs, make_engine_cost, make_line, make_scenario, play_through
from tests.flow.scenarios import live
from tests.flow.witness import Witness
from tests.sim.factory import request


def fault(kind: str, target: str, at_s: float, *, factor: float = 1.0) -> FaultConfig:
    return FaultConfig(kind=kind, target=target, at_s=at_s, for_s=0.0, factor=factor)  # type: ignore[arg-type]


def put_engine(flow: AsyncTrainingFlow, number: int, kind: type[SimulatedEngine]) -> SimulatedEngine:
    """Another kind of engine in the place of one of a flow that has not started."""
    engines = list(flow.backends.engines)
    old = engines[number]
    assert isinstance(old, SimulatedEngine)
    new = engines[number] = kind(old.name, old._cost, health=old._health)
    flow.backends = replace(flow.backends, engines=engines)
    return new


def crash_trainer(flow: AsyncTrainingFlow) -> None:
    assert isinstance(flow.backends.trainer, SimulatedTrainer)
    flow.backends.trainer._health.begin(fault("crash", "trainer", 0.0))


# -- the source


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("steps", [2, 5])
def test_a_source_with_exactly_as_many_tasks_as_the_steps_need_is_trained_to_the_end(
    alpha: float, steps: int, tmp_path: Path
) -> None:
    scenario = make_scenario(
        groups_per_step=4, max_steps=steps, async_generation_ratio=alpha, world={"tasks": 4 * steps}
    )
    played = play_through(scenario, tmp_path)
    assert played.summary.finished and played.summary.trained == steps, played.summary
    assert len(played.of("group.start")) == 4 * steps


# -- a trainer that is lost


@pytest.mark.parametrize("at_s", [5.0, 5.25, 5.5, 5.75, 6.0])
def test_weights_that_a_lost_trainer_has_undone_make_no_action_any_more(at_s: float, tmp_path: Path) -> None:
    weights = SimulatedWeightsConfig(buckets=3, gather_s=0.5, send_s=1.0, load_s=0.2, flip_s=0.01)
    costs = make_costs(weights=weights, response_tokens=DistributionConfig(mean=30))
    scenario = make_scenario(
        fault("crash", "trainer", at_s),
        engines=2,
        costs=costs,
        groups_per_step=4,
        max_steps=8,
        async_generation_ratio=2.0,
    )
    witness = Witness(scenario.settings)
    summary = live(scenario, tmp_path / "run", witness)  # the witness looks at the way between weights itself
    assert summary is not None and summary.finished and summary.restarts == 1
    back = next(number for number, event in enumerate(witness.events) if event.kind == "up" and event.who == "trainer")
    seeded: set[str] = set()
    for event in witness.events[back:]:
        if event.kind == "served":
            seeded.add(event.who)
        assert event.kind != "request.start" or event.who in seeded, f"{event.who} serves what was undone: {event}"
    assert len(seeded) == 2


def test_a_lane_paused_by_a_validation_that_was_torn_down_goes_on_in_the_next_line(tmp_path: Path) -> None:
    class SlowToAbort(SimulatedEngine):
        async def abort(self, request_id: str) -> None:
            if not lost:
                lost.append(self.name)
                asyncio.get_running_loop().call_later(0.1, crash_trainer, flows[0])
            await asyncio.sleep(0.3)
            await super().abort(request_id)

    def prepare(flow: AsyncTrainingFlow) -> None:
        flows.append(flow)
        put_engine(flow, 0, SlowToAbort)

    flows: list[AsyncTrainingFlow] = []
    lost: list[str] = []
    played = play_through(
        make_scenario(
            costs=make_costs(response_tokens=DistributionConfig(mean=300)),
            groups_per_step=4,
            max_steps=8,
            async_generation_ratio=1.0,
            save_steps=1,
            eval_steps=3,
            val_batch_size=2,
            pause_generation_for_validation=True,
        ),
        tmp_path,
        prepare=prepare,
    )
    assert lost and played.summary.restarts == 1
    assert played.summary.finished, played.summary


def test_a_trainer_that_hangs_while_a_clean_stop_saves_it_does_not_hang_the_run(tmp_path: Path) -> None:
    def prepare(flow: AsyncTrainingFlow) -> None:
        asyncio.get_running_loop().call_later(10.0, flow.stop)

    scenario = make_scenario(fault("hang", "trainer", 9.9), groups_per_step=4, max_steps=60, async_generation_ratio=1.0)
    played = play_through(scenario, tmp_path, prepare=prepare, max_time_s=1_000)
    assert not played.summary.finished
    assert played.events[-1].time_s < 10 + 3 * RELIABILITY.train_timeout_s


# -- a run that is stopped


def test_a_clean_stop_and_a_resume_give_up_no_group(tmp_path: Path) -> None:
    def prepare(flow: AsyncTrainingFlow) -> None:
        asyncio.get_running_loop().call_later(8.7, flow.stop)

    environment = SimulatedEnvironmentConfig(turns=DistributionConfig(mean=3.0), step_s=DistributionConfig(mean=0.5))
    zero_variance = DistributionConfig(kind="lognormal", mean=60, std=40, min=1, max=400)
    costs = make_costs(environment=environment, response_tokens=zero_variance)
    scenario = make_scenario(
        engines=2, costs=costs, groups_per_step=4, group_size=4, max_steps=8, async_generation_ratio=1.0, save_steps=1
    )
    first = play_through(scenario, tmp_path, prepare=prepare)
    assert 0 < first.summary.trained < 8
    finished = {event.data["sample"] for event in first.of("sample.finish")}
    second = play_through(scenario, tmp_path)
    assert finished & {event.data["sample"] for event in second.of("sample.reopen")}
    assert second.of("group.drop", reason="lost_lineage") == []
    assert second.summary.finished


def test_a_run_stopped_while_engines_go_on_after_an_update_trains_nothing_twice(tmp_path: Path) -> None:
    class SlowToResume(SimulatedEngine):
        async def resume(self) -> None:
            await asyncio.sleep(0.05)
            await super().resume()

    class Stopping(SimulatedTrainer):
        async def train(self, batch: Batch) -> Mapping[str, float]:
            metrics = await super().train(batch)
            if batch.trained == 2 and len(flows) == 1:
                asyncio.get_running_loop().call_later(0.01, flows[0].stop)
            return metrics

    def prepare(flow: AsyncTrainingFlow) -> None:
        for number in range(len(flow.backends.engines)):
            put_engine(flow, number, SlowToResume)
        flow.backends = replace(flow.backends, trainer=Stopping(TrainerCost(fixed_s=1.0)))
        flows.append(flow)

    flows: list[AsyncTrainingFlow] = []
    scenario = make_scenario(
        engines=2,
        groups_per_step=4,
        max_steps=5,
        async_generation_ratio=1.0,
        hybrid_engine=True,
        world={"train_devices": (1, 2)},
    )
    first = play_through(scenario, tmp_path, prepare=prepare)
    assert first.summary.trained == len(first.of("step.end")) == 3 and not first.summary.finished
    second = play_through(scenario, tmp_path, prepare=prepare)
    assert second.summary.finished
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        (written,) = db.execute("SELECT count(*) FROM samples WHERE end = 'trained'").fetchone()
    assert second.flow.backends.trainer.samples == written == 5 * 4  # type: ignore[attr-defined]


# -- replicas


@pytest.mark.parametrize("error", [EngineError("cuda: illegal memory access"), ValueError("not one of ours")])
def test_one_replica_that_fails_every_request_at_once_harms_nobody(error: Exception, tmp_path: Path) -> None:
    class Sick(SimulatedEngine):
        async def generate(self, request: Request, progress: Progress) -> FinishReason:
            raise error

    scenario = make_scenario(engines=4, groups_per_step=4, group_size=2, max_steps=10, async_generation_ratio=1.0)
    played = play_through(scenario, tmp_path, prepare=lambda flow: put_engine(flow, 0, Sick) and None)
    assert played.summary.finished and played.summary.restarts == 0
    assert played.of("group.drop", reason="group_failed") == []
    assert played.of("down", who="engine/0"), "it is restarted, in the hope that this helps"


def test_a_prompt_that_kills_whoever_runs_it_is_given_up_after_a_few_replicas(tmp_path: Path) -> None:
    class Assertive(SimulatedEngine):
        async def generate(self, request: Request, progress: Progress) -> FinishReason:
            if request.session.startswith("9."):
                self._die("device-side assert")
                raise EngineCrashed("device-side assert")
            return await super().generate(request, progress)

    def prepare(flow: AsyncTrainingFlow) -> None:
        for number in range(len(flow.backends.engines)):
            put_engine(flow, number, Assertive)

    scenario = make_scenario(engines=8, groups_per_step=4, group_size=4, max_steps=8, async_generation_ratio=1.0)
    played = play_through(scenario, tmp_path, prepare=prepare)
    assert len(played.of("down")) <= 4 * (1 + RELIABILITY.sample_retries), "every member has its budget, and no more"
    assert played.first("group.drop", group=9).data["reason"] == "group_failed"
    assert played.summary.finished


def test_failures_with_a_quiet_time_between_are_not_in_a_row(tmp_path: Path) -> None:
    crashes = [fault("crash", "engine/0", 20.0 + 50.0 * number) for number in range(5)]
    played = play_through(make_scenario(*crashes, engines=2, max_steps=230, async_generation_ratio=1.0), tmp_path)
    restarts = played.of("restart", who="engine/0")
    assert [event.data["attempt"] for event in restarts] == [1] * 5
    assert played.of("degrade") == [] and played.summary.finished


def test_one_replica_too_slow_to_be_updated_costs_neither_the_trainer_nor_the_others(tmp_path: Path) -> None:
    costs = make_costs(weights=SimulatedWeightsConfig(buckets=10, gather_s=0.1, send_s=0.3, load_s=1.0, flip_s=0.01))
    slow = fault("slowdown", "engine/0", 5.0, factor=40.0)
    scenario = make_scenario(
        slow, engines=4, costs=costs, groups_per_step=4, max_steps=12, async_generation_ratio=1.0, save_steps=5
    )
    played = play_through(scenario, tmp_path)
    assert played.summary.finished and played.summary.restarts == 0, played.summary
    assert played.of("down", who="trainer") == [] and played.of("restart", who="trainer") == []
    assert {event.who for event in played.of("down")} == {"engine/0"}


# -- devices that are shared


def test_a_teardown_with_turns_waiting_for_the_devices_lets_the_engines_go_on() -> None:
    async def main() -> tuple[str, list[str]]:
        clock = asyncio.get_running_loop().time
        lock = ResourceLock("devices of train", waits=WaitGraph(clock), clock=clock)
        engines: list[str] = []

        async def halt() -> None:
            engines.append("halt")

        async def go_on() -> None:
            engines.append("go on")

        async def hold(owner: str) -> None:
            async with lock.hold(owner, 9.0):
                await asyncio.sleep(1.0)

        async def die() -> None:
            await asyncio.sleep(0.5)
            raise ValueError("lost")

        lock.call_when_held(halt, when_free=go_on)
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                for owner in ("first", "second", "third"):
                    tasks.create_task(hold(owner))
                tasks.create_task(die())
        return lock.owner, engines

    owner, engines = run_on_virtual_clock(main())
    assert owner == "" and engines[-1] == "go on"


def test_a_replica_that_comes_back_just_as_the_devices_are_given_back_decodes(tmp_path: Path) -> None:
    class SlowToPause(SimulatedEngine):
        async def pause(self) -> None:
            pausing.set()
            await asyncio.sleep(0.1)
            await super().pause()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            pipeline, _ = make_line(make_scenario(), tmp_path, tasks=tasks)
            replica = pipeline.hub.replicas[0]
            replica.engine = SlowToPause(replica.name, make_engine_cost())
            await pipeline.updater.push(0, [replica])
            pipeline.hub.fail(replica, EngineCrashed("just so"))
            await pipeline.hub.halt_engines()
            await pausing.wait()  # it is back, and finds that it is to stand still
            await pipeline.hub.continue_engines()
            await asyncio.sleep(1.0)
            assert replica.health == "up"
            began_s = asyncio.get_running_loop().time()
            await pipeline.hub.generate(request("a", 10), Progress())
            assert asyncio.get_running_loop().time() == pytest.approx(began_s + 0.1)
            pipeline.recorder.ledger.close()

    pausing = asyncio.Event()
    run_on_virtual_clock(main(), max_time_s=100)
