"""The same runs in the simulator: the scheduler of the run on a virtual clock."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.pictures.rows import Row, measure_costs
from benchmarks.pictures.scorers import RandomScores, WaitingReward

from headway.config import ResolvedConfig
from headway.config.simulation_config import (
    DistributionConfig,
    SimulatedEngineConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
    SimulationConfig,
)
from headway.flow.backends import RunContext
from headway.flow.training_flow import AsyncTrainingFlow
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.rewards.base import Reward
from headway.settings import make_run_settings
from headway.sim.fault_injection import FaultInjector
from headway.sim.simulated_run import Scenario, make_simulated_backends
from headway.sim.virtual_clock import run_on_virtual_clock as run_virtually


def predict_row(
    args: argparse.Namespace, row: Row, resolved: ResolvedConfig, known: Mapping[str, float]
) -> dict[str, float]:
    """The scheduler of the run on a virtual clock, with the costs of the first row.

    There, a decoupled trainer and engine have devices of their own; `shared_s` is a step where they have one between
    them, on which neither is faster for the other's sake: no less than denoising and training one after the other.
    """
    waves = args.prompts * args.group / args.slots
    simulation = SimulationConfig(
        response_tokens=DistributionConfig(mean=args.denoising_steps),
        prompt_tokens=DistributionConfig(mean=1),
        engine=SimulatedEngineConfig(
            slots=args.slots,
            step_s=known["denoise_s"] / (waves * args.denoising_steps),
            step_per_request_s=0.0,
            prefill_tokens_per_s=1e9,
        ),
        trainer=SimulatedTrainerConfig(fixed_s=known["train_s"]),
        weights=SimulatedWeightsConfig(buckets=1, load_s=known["update_s"]),
    )
    scenario = Scenario(
        settings=replace(make_run_settings(resolved), max_steps=args.warmup + args.steps + row.alpha),
        simulation=simulation,
        train_devices=(0,),
        infer_devices=(0,) if row.hybrid else (1,),
    )
    events: list[LoggedEvent] = []
    with tempfile.TemporaryDirectory() as scratch:
        run_virtually(_simulate(args, row, scenario, Path(scratch), events))
    found = measure_costs(args, events)
    return {**found, "shared_s": max(found["step_s"], known["denoise_s"] + known["train_s"])}


async def _simulate(
    args: argparse.Namespace, row: Row, scenario: Scenario, run_dir: Path, events: list[LoggedEvent]
) -> None:
    scorers: dict[str, Reward] = {
        "none": RandomScores(),
        "cpu": WaitingReward(args.score_ms / 1000, args.workers),
        "http": WaitingReward(args.latency_s, args.connections),
    }
    scorer = scorers[row.scorer]
    backends = make_simulated_backends(scenario, FaultInjector((), engines=1))
    clock = asyncio.get_running_loop().time
    flow = AsyncTrainingFlow(
        trainer=RunContext(
            backends=replace(backends, reward=scorer),
            settings=scenario.settings,
            events=EventLog(clock, events.append),
            run_dir=run_dir,
            clock=clock,
        )
    )
    await flow.run()
