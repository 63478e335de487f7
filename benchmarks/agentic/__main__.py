"""`python benchmarks/agentic.py [--parts pace episodes] [--quick] [--json FILE]`: run and print the tables.

`pace`: four runs with the same environments, policy and batch. Each waits for less than the one before:

    barrier between turns      no episode takes its next turn before all have taken this one; α = 0
    environment-level async    an episode continues when its own environment has answered; α = 0
    + async training           rollout runs ahead of training by at most one version; α = 1
    + redundancy               more groups and members than needed are started; the last ones are cancelled

The environments are real ones (FrozenLake) that answer after N(μ, σ). The policy has 0.1 million parameters, so waiting
takes most of the time. Each row also shows the simulator's prediction (`agentic/prediction.py`).
`episodes`: a thousand episodes at once, ten thousand in all, and what they leave behind (`agentic/many_episodes.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.agentic import many_episodes
from benchmarks.agentic.measured_runs import (
    CALIBRATION_ROW,
    MEASURED_ROWS,
    AgenticScenario,
    MeasuredRow,
    StepCosts,
    make_config,
    measure_row,
)
from benchmarks.agentic.prediction import CostCalibration, calibrate_costs, predict_costs
from rich.console import Console
from rich.table import Table

PARTS = ("pace", "episodes")
TOLERANCE = 0.15
"""Largest acceptable relative error of a predicted ratio."""
MODEL = "tiny-sums"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """One row of the table."""

    name: str
    measured: StepCosts
    predicted: StepCosts
    load: float
    """Load average of the machine at the end of the run; the machine may be shared."""
    ratio: float
    predicted_ratio: float

    @property
    def error(self) -> float:
        return self.predicted_ratio / self.ratio - 1


def measure_pace(
    sizes: AgenticScenario,
    model: str,
    *,
    seeds: int,
    rows: tuple[MeasuredRow, ...] = MEASURED_ROWS,
    processes: bool | None = None,
) -> tuple[list[ResultLine], CostCalibration]:
    """Measure the rows one after the other and predict them with the simulator."""
    scratch, runs = Path(tempfile.mkdtemp(prefix="headway-agentic-")), []
    try:
        for number, row in enumerate(rows):
            resolved = make_config(sizes, row, model, scratch / str(number), processes=processes)
            runs.append((row, resolved, *measure_row(sizes, row, resolved), os.getloadavg()[0]))
            print(f"{row.name}: {runs[-1][2].step_s:.2f} s a step", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    known = next(calibrate_costs(found, events) for row, _, found, events, _ in runs if row is CALIBRATION_ROW)
    predictions = [predict_costs(sizes, row, resolved, known, range(seeds)) for row, resolved, *_ in runs]
    lines = [
        ResultLine(
            name=row.name,
            measured=found,
            predicted=prediction,
            load=load,
            ratio=runs[0][2].step_s / found.step_s,
            predicted_ratio=predictions[0].step_s / prediction.step_s,
        )
        for (row, _, found, _, load), prediction in zip(runs, predictions, strict=True)
    ]
    return lines, known


def show_pace(console: Console, sizes: AgenticScenario, lines: list[ResultLine], known: CostCalibration) -> None:
    """Print the table."""
    console.print(
        f"{sizes.groups} × {sizes.members} episodes a step, {sizes.turns} turns, steps of "
        f"N({sizes.mean_s:g}, {sizes.std_s:g}) s"
        + (f", of which {sizes.hang:.1%} hang and are abandoned after {sizes.timeout_s:g} s" if sizes.hang else "")
        + f"; redundant: {sizes.groups + sizes.spare_groups} × {sizes.members + sizes.spare_members}; seed {sizes.seed}"
    )
    console.print(
        f"costs given to the simulator (of “{CALIBRATION_ROW.name}”): {1000 * known.engine_s:.0f} ms a token, "
        f"{known.train_s:.2f} s a training step, {known.update_s:.2f} s a weight update"
    )
    table = Table("", "s/step", "ratio", "request s", "between s", "training s", "lag", "load")
    for column in ("simulated s/step", "ratio", "off by", "request s", "between s"):
        table.add_column(column)
    for line in lines:
        found, close = line.measured, abs(line.error) <= TOLERANCE
        numbers = (found.turn_s, found.between_s, found.train_s, found.lag)
        table.add_row(
            line.name,
            f"{found.step_s:.2f}",
            f"{line.ratio:.2f}×",
            *(f"{number:.2f}" for number in numbers),
            f"{line.load:.0f}",
            f"{line.predicted.step_s:.2f}",
            f"{line.predicted_ratio:.2f}×",
            f"{line.error:+.0%}" if close else f"{line.error:+.0%}, beyond {TOLERANCE:.0%}",
            f"{line.predicted.turn_s:.2f}",
            f"{line.predicted.between_s:.2f}",
        )
    console.print(table)


def show_episodes(console: Console, runs: list[many_episodes.EpisodeMeasurement]) -> None:
    """Print the table."""
    table = Table("steps of environments", "at once", "ended", "wall s", "CPU s", "ms CPU each", "KB each")
    for column in ("left bytes each", "blocks first → last", "episodes, tasks, threads, files left"):
        table.add_column(column)
    for run in runs:
        first, last = run.snapshots[0], run.snapshots[-1]
        table.add_row(
            run.step_kind,
            f"{run.most:,}",
            f"{run.ended:,}",
            f"{run.wall_s:.1f}",
            f"{run.cpu_s:.1f}",
            f"{1000 * run.cpu_s / run.ended:.2f}",
            f"{1024 * run.held_mb / run.most:.1f}",
            f"{run.leaked_bytes:,.0f}",
            f"{first.blocks:,} → {last.blocks:,}",
            ", ".join(
                f"{getattr(first, name)} → {getattr(last, name)}" for name in ("episodes", "tasks", "threads", "files")
            ),
        )
    console.print(table)


def main() -> None:
    """Run the parts and print their tables."""
    args = parse_arguments()
    sizes = AgenticScenario(**{one.name: getattr(args, one.name) for one in fields(AgenticScenario)})
    at_once, ended = args.at_once, args.ended
    if args.quick:
        sizes = replace(sizes, groups=2, members=2, turns=2, mean_s=sizes.mean_s / 5, std_s=sizes.std_s / 5, steps=1)
        at_once, ended = 40, 120
    console = Console(width=160, highlight=False)
    kept: dict[str, Any] = {"machine": describe_machine()}
    console.print(kept["machine"])
    if "episodes" in args.parts:
        many = [
            many_episodes.measure_in_new_process(way, at_once=at_once, ended=ended) for way in many_episodes.STEP_KINDS
        ]
        show_episodes(console, many)
        kept["episodes"] = [{**asdict(one), "leaked_bytes": one.leaked_bytes} for one in many]
    if "pace" in args.parts:
        lines, known = measure_pace(sizes, MODEL, seeds=args.seeds)
        show_pace(console, sizes, lines, known)
        told = {**asdict(known), "tokens": sum(known.tokens), "turns": sum(known.turns)}
        kept |= {"sizes": asdict(sizes), "calibration": told, "pace": [asdict(line) for line in lines]}
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


def describe_machine() -> str:
    """Return time, machine and commit."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {os.cpu_count()} cores, load {load}, "
        f"commit {done.stdout.strip() or 'unknown'}"
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--seeds", type=int, default=8, help="of the simulator, whose mean is shown")
    parser.add_argument("--at-once", type=int, default=1000, help="episodes; a multiple of eight")
    parser.add_argument("--ended", type=int, default=10_000, help="episodes in all")
    usual: dict[str, Any] = asdict(AgenticScenario())
    for name, value in usual.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
