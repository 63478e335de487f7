"""`headway measure`: how long the parts of a step take on this machine, as a `simulation:` block.

    headway measure run.yaml                          train a few steps synchronously, and print the block
    headway measure run.yaml --steps 5 --out costs.yaml
    headway simulate run.yaml --costs costs.yaml      and `headway plan` alike

The steps are real, in a directory of their own that is removed; the first is left out, because it warms up. Lengths of
answers are those of the policy as it is now. Costs of more devices than this machine has are extrapolated from these.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from headway.cli.command_line import add_run_arguments, at_least_one, load_run_config, make_policy_override
from headway.config import ResolvedConfig, load_config
from headway.config.document import nest_values
from headway.errors import ConfigError, HeadwayError
from headway.launch.training_session import open_run_directory, prepare_run, run_training
from headway.monitor.event_log import LoggedEvent
from headway.monitor.events import RequestEnd
from headway.monitor.run_report import RunMonitor
from headway.sim.cost_calibration import MeasuredPhases, calibrate_costs
from headway.sim.simulated_run import make_scenario

HELP = "measure what simulate and plan should assume"
_WITHOUT = ("eval_steps=0", "save_steps=0", "track_with=[]", "eval_at_start=false", "resume=never")
_SYNCHRONOUS = ("async_generation_ratio=0", "updates_per_sync=1", "filter_zero_variance=false")
_MOST_LENGTHS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--steps", type=at_least_one, default=2, help="steps to measure, after one to warm up (2)")
    parser.add_argument("--out", type=Path, help="write the block to this file")


def run_command(args: argparse.Namespace) -> int:
    """Train a few steps, and print what they cost as a block of the configuration."""
    newest = make_policy_override(args.arguments[0]) if args.arguments else []
    words = [*args.arguments, *newest]
    resolved = load_run_config(words)
    with tempfile.TemporaryDirectory(prefix="headway-measure-") as directory:
        steps = (f"max_steps={args.steps + 1}", f"output_dir={directory}/run")
        short = load_run_config([*words, *_WITHOUT, *_SYNCHRONOUS, *steps])
        monitor, lengths = asyncio.run(_train(short))
    costs = measure_costs(resolved, monitor, lengths)
    text = yaml.safe_dump({"simulation": costs}, sort_keys=False)
    print(text, end="")
    if args.out is not None:
        try:
            args.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", key="--out", value=str(args.out)) from error
    return 0


def is_whole_answer(event: object) -> TypeGuard[RequestEnd]:
    """Return whether a request ended by itself: what was aborted in the middle says nothing about lengths."""
    return isinstance(event, RequestEnd) and event.finish in ("stop", "length") and event.actions > 0


async def _train(short: ResolvedConfig) -> tuple[RunMonitor, list[int]]:
    """Train a few steps and return what was measured, and the lengths of the answers."""
    monitor, lengths = RunMonitor(1), list[int]()

    def note_length(logged: LoggedEvent) -> None:
        event = logged.event
        if is_whole_answer(event) and len(lengths) < _MOST_LENGTHS:
            lengths.append(event.actions)

    prepared = prepare_run(short)
    print(f"training {short.config.max_steps} steps: {prepared.placement.summary}", file=sys.stderr)
    with open_run_directory(prepared) as directory:
        summary = await run_training(prepared, directory, sinks=[monitor, note_length])
    if not summary.finished:
        raise HeadwayError(f"the measured run ended early: {summary.reason}")
    return monitor, lengths


def measure_costs(resolved: ResolvedConfig, monitor: RunMonitor, lengths: list[int]) -> dict[str, Any]:
    """Return the `simulation:` block whose synchronous run has the lengths and the phases that were measured."""
    spread = statistics.pstdev(lengths)
    response = {"kind": "lognormal" if spread else "fixed", "mean": round(statistics.fmean(lengths), 1)}
    block: dict[str, Any] = {
        "response_tokens": {**response, "std": round(spread, 1), "min": min(lengths), "max": max(lengths)}
    }
    measured = {"simulation.response_tokens": block["response_tokens"], "filter_zero_variance": False}
    scenario = make_scenario(load_config(resolved.given(), measured))  # with as many answers as the measured run
    phases = monitor.phases.phases()
    train, infer = len(scenario.train_devices), len(scenario.infer_devices)
    found = calibrate_costs(scenario, MeasuredPhases(gen=phases.generation_s, gpus=infer))
    work = MeasuredPhases(logp=phases.logp_s, update=phases.update_s, sync=phases.sync_s, gpus=train)
    costs = found | calibrate_costs(scenario, work)
    return block | nest_values({tuple(key.split(".")[1:]): value for key, value in costs.items()})
