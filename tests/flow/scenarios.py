"""Random scenarios with faults, and a witness that sees what is really trained."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

from headway.config import ReliabilityConfig
from headway.config.simulation_config import (
    DistributionConfig,
    EngineChangeConfig,
    SimulatedEngineConfig,
    SimulatedEnvironmentConfig,
    SimulatedRewardConfig,
    SimulatedScorerConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
    SimulationConfig,
)
from headway.flow.training_flow import AsyncTrainingFlow, RunSummary
from headway.ledger import Ledger
from headway.monitor.event_log import LoggedEvent
from headway.seeding import Rng, make_rng
from headway.settings import RunSettings
from headway.sim.simulated_run import Scenario, play_scenario
from headway.sim.virtual_clock import run_on_virtual_clock as run_virtually
from tests.flow.witness import Witness
from tests.sim.factory import draw_random_faults

HORIZON_S = 60.0
RELIABILITY = ReliabilityConfig(
    request_timeout_s=40.0,
    abort_timeout_s=3.0,
    episode_timeout_s=120.0,
    environment_timeout_s=8.0,
    reward_timeout_s=8.0,
    train_timeout_s=30.0,
    transfer_timeout_s=6.0,
    lock_timeout_s=500.0,
    stall_timeout_s=300.0,
    restart_backoff_s=0.5,
    probe_s=10.0,
    quiet_s=40.0,
)


def pick(rng: Rng, *choices: object) -> object:
    return choices[rng.randrange(0, len(choices))]


def random_settings(rng: Rng) -> RunSettings:
    size = rng.randrange(1, 6)
    alpha = float(pick(rng, 0, 0, 0.5, 1, 1, 1.5, 2, 3))  # type: ignore[arg-type]
    return RunSettings(
        groups_per_step=size,
        group_size=rng.randrange(1, 5),
        max_steps=rng.randrange(2, 7),
        async_generation_ratio=alpha,
        pipeline_depth=pick(rng, None, None, alpha / 2),  # type: ignore[arg-type]
        staleness_policy=pick(rng, "drop", "wait", "window"),  # type: ignore[arg-type]
        staleness_window=pick(rng, 2 * size, size, 3 * size),  # type: ignore[arg-type]
        selection_order=pick(rng, "freshest", "oldest"),  # type: ignore[arg-type]
        additional_groups=pick(rng, 0, 0, 2),  # type: ignore[arg-type]
        redundant_members=pick(rng, 0, 0, 1, 2),  # type: ignore[arg-type]
        with_reward=rng.random() < 0.7,
        filter_zero_variance=rng.random() < 0.7,
        rollout_scheduling=pick(rng, "queue", "queue", "queue", "batch"),  # type: ignore[arg-type]
        is_num_return_sequences_expand=rng.random() < 0.8,
        env_scheduling="barrier" if rng.random() < 0.1 else "async",
        enable_dual_buffer=rng.random() < 0.7,
        save_steps=pick(rng, 0, 1, 2, 3),  # type: ignore[arg-type]
        eval_steps=pick(rng, 0, 0, 2),  # type: ignore[arg-type]
        val_batch_size=3,
        eval_at_start=False,
        save_total_limit=0,
        max_num_gen_batches=0,
        seed=0,
        pause_generation_for_validation=rng.random() < 0.5,
        reliability=RELIABILITY,
    )


def synced_rarely(rng: Rng, settings: RunSettings) -> RunSettings:
    """Some train several steps between two weight syncs, as many as their depth allows."""
    most = int(settings.depth) + 1
    return replace(settings, updates_per_sync=1 + rng.randrange(0, most))


def zero_variance(rng: Rng, mean: float) -> DistributionConfig:
    kind = pick(rng, "fixed", "gaussian", "lognormal")
    return DistributionConfig(kind=kind, mean=mean, std=mean * rng.random(), max=mean * 8)  # type: ignore[arg-type]


def random_simulation(rng: Rng) -> SimulationConfig:
    turns = pick(rng, 1, 1, 3)
    return SimulationConfig(
        response_tokens=replace(zero_variance(rng, 60.0), min=1),
        prompt_tokens=DistributionConfig(mean=20),
        engine=SimulatedEngineConfig(
            slots=rng.randrange(1, 9),
            step_s=0.01,
            step_per_request_s=0.002 * rng.random(),
            step_per_context_token_s=pick(rng, 0.0, 1e-6),  # type: ignore[arg-type]
            prefill_tokens_per_s=2000.0,
            kv_tokens=pick(rng, None, 1600),  # type: ignore[arg-type]
            restart_s=2.0,
        ),
        trainer=SimulatedTrainerConfig(gpu_s_per_token=0.002 * rng.random(), fixed_s=0.5, save_s=0.2, restart_s=2.0),
        ref_logp=SimulatedScorerConfig(fixed_s=pick(rng, 0.0, 0.1), with_trainer=rng.random() < 0.5),  # type: ignore[arg-type]
        critic=SimulatedScorerConfig(fixed_s=pick(rng, 0.0, 0.0, 0.1)),  # type: ignore[arg-type]
        weights=SimulatedWeightsConfig(buckets=3, gather_s=0.1, send_s=rng.random(), load_s=0.2, flip_s=0.01),
        environment=SimulatedEnvironmentConfig(
            turns=DistributionConfig(mean=float(turns)),  # type: ignore[arg-type]
            step_s=zero_variance(rng, 0.5 * rng.random()),
            failure_probability=pick(rng, 0.0, 0.0, 0.05),  # type: ignore[arg-type]
            hang_probability=pick(rng, 0.0, 0.0, 0.01),  # type: ignore[arg-type]
        ),
        reward=SimulatedRewardConfig(
            latency_s=zero_variance(rng, 0.5 * rng.random()),
            zero_variance_share=pick(rng, 0.0, 0.2),  # type: ignore[arg-type]
            failure_probability=pick(rng, 0.0, 0.0, 0.1),  # type: ignore[arg-type]
        ),
        gpus_per_node=2,
    )


def random_changes(rng: Rng) -> tuple[EngineChangeConfig, ...]:
    """Engines that come and go, in every other scenario; most ask for whoever came last, some by name."""
    changes = []
    for _ in range(int(pick(rng, 0, 0, 2, 4))):  # type: ignore[call-overload]
        kind = pick(rng, "join", "leave")
        engine = pick(rng, None, None, "engine/0") if kind == "leave" else None
        changes.append(EngineChangeConfig(kind=kind, at_s=rng.random() * HORIZON_S, engine=engine))  # type: ignore[arg-type]
    return tuple(changes)


def bounded(rng: Rng, settings: RunSettings, simulation: SimulationConfig) -> tuple[RunSettings, SimulationConfig]:
    """Some keep few checkpoints; some have mostly groups with equal rewards, and a bound on replacing them."""
    keep, most = pick(rng, 0, 1, 2), pick(rng, 0, 1, 2, 4)
    if most:
        simulation = replace(simulation, reward=replace(simulation.reward, zero_variance_share=0.8))
    return replace(settings, save_total_limit=keep, max_num_gen_batches=most), simulation  # type: ignore[arg-type]


def random_scenario(seed: int, *, faults: float = 3.0) -> Scenario:
    """A small world, and something wrong with it."""
    rng = make_rng(seed, "scenario")
    engines = rng.randrange(1, 5)
    simulation = random_simulation(rng)
    broken = draw_random_faults(rng, HORIZON_S, engines, faults * 2 * rng.random(), nodes=1 + (engines - 1) // 2)
    colocated = rng.random() < 0.25
    infer = tuple(range(engines)) if colocated else tuple(range(2, 2 + engines))
    elastic = make_rng(seed, "elastic")
    settings, simulation = bounded(make_rng(seed, "bounds"), random_settings(rng), simulation)
    settings = synced_rarely(make_rng(seed, "syncs"), settings)
    return Scenario(
        settings=settings,
        simulation=replace(simulation, faults=broken, changes=random_changes(elastic)),
        train_devices=infer if colocated else (0, 1),
        infer_devices=infer,
        lend=not colocated and elastic.random() < 0.4,
        seed=seed,
        tasks=None if rng.random() < 0.8 else 30,
    )


def live(
    scenario: Scenario, run_dir: Path, witness: Witness, *, until: int | None = None, how: str = ""
) -> RunSummary | None:
    """One life of a run: to its end, or `how` = `stop` (cleanly) or `kill` after event number `until`."""

    witness.rewind(run_dir)

    async def main() -> RunSummary | None:
        loop = asyncio.get_running_loop()
        seen = 0
        killed = asyncio.Event()

        def count(event: LoggedEvent) -> None:
            nonlocal seen
            seen += 1
            if seen == until and how == "stop" and witness.flow is not None:
                witness.flow.stop("the test said so")
            elif seen == until and how == "kill":
                photograph(run_dir)
                loop.call_soon(killed.set)
            if not killed.is_set() and not (how == "kill" and until is not None and seen > until):
                witness.events.append(event)
            witness.hear(event)

        task = loop.create_task(play_scenario(scenario, run_dir=run_dir, sinks=[count], on_flow=witness.attach))
        death = loop.create_task(killed.wait())
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            death.cancel()
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None

    summary = run_virtually(main(), max_events=3_000_000)
    if how == "kill" and summary is None:
        develop(run_dir)
    return summary


def photograph(run_dir: Path) -> None:
    """What a kill at this instant would leave on the disk."""
    copy = run_dir.with_name(run_dir.name + ".photo")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run_dir, copy)


def develop(run_dir: Path) -> None:
    """Put the photograph in the place of what was written after it."""
    shutil.rmtree(run_dir)
    shutil.move(run_dir.with_name(run_dir.name + ".photo"), run_dir)


def check_ledger(run_dir: Path, witness: Witness) -> None:
    """Every started sample has exactly one end, and the ledger agrees with the witness."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    try:
        assert ledger.audit() == []
        counts = dict(ledger.counts())
        assert counts.get("open", 0) == 0, counts
    finally:
        ledger.close()
    trained = {sample for samples in witness.lineage.values() for sample in samples}
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        rows = {row[0] for row in db.execute("SELECT sample_id FROM samples WHERE end = 'trained'")}
    assert rows == trained, f"ledger and trainer disagree: {sorted(rows ^ trained)[:5]}"


def check_ends(events: list[LoggedEvent]) -> None:
    """Between two starts of a sample there is one end; afterwards there is exactly one."""
    state: dict[str, str] = {}
    for event in events:
        if event.kind == "sample.start" and event.who == "generate":
            assert event.data["sample"] not in state, f"{event.data['sample']} started twice"
            state[event.data["sample"]] = "open"
        elif event.kind == "sample.reopen":
            assert state[event.data["sample"]] != "dropped", f"{event.data['sample']} was dropped"
            state[event.data["sample"]] = "open"
        elif event.kind == "sample.end":
            assert state.get(event.data["sample"]) == "open", event
            state[event.data["sample"]] = event.data["end"]
    left = [sample for sample, end in state.items() if end == "open"]
    assert not left, f"no end for {left[:5]}"


def check_slots(flow: AsyncTrainingFlow) -> None:
    """No slot is held by anything but a group that is still wanted, and nothing is left behind."""
    pipeline = flow.pipeline
    assert pipeline is not None
    assert pipeline.headway.in_flight == sum(t.state == "in flight" for t in pipeline.headway.group_slots.values())
    assert pipeline.headway.ready_count == sum(t.state == "ready" for t in pipeline.headway.group_slots.values())
    assert pipeline.headway.in_flight >= 0 <= pipeline.headway.ready_count
    for slot in pipeline.headway.group_slots.values():
        waits_to_be_served = slot.state == "trained" and slot.trained_version > pipeline.headway.served
        assert slot.is_live or waits_to_be_served or slot.state == "training", f"{slot.number}: {slot.state}"
    assert not pipeline.hub._router._sessions, "sessions are forgotten"
    assert not pipeline.hub._router.paused, "no lane stays paused"
    for replica in pipeline.hub.replicas:
        assert not replica.inflight and not len(replica.pinned), replica.name
        assert replica.pause_count == int(pipeline.hub._halted), f"{replica.name} is held {replica.pause_count} times"
    assert set(pipeline.loop.runs) <= set(pipeline.headway.group_slots), "runs of groups that are gone"
