"""Who pays for a straggler? Simulated: seconds per step, lag and length bias of each staleness policy, α and tail.

    python benchmarks/straggler_policies.py --jobs 16                      # all tables, 40 steps and 4 seeds a cell
    python benchmarks/straggler_policies.py --seeds 1 --steps 12 --alphas 1 --workloads medium     # does it run at all?
    python benchmarks/straggler_policies.py --property 200 --policies wait-oldest    # bias of a policy over 200 seeds

The real scheduler runs on the virtual clock. The simulator knows how long every answer will be when it starts, so the
bias is exact: it compares the trained answers with all that were started, both of the same steps. A prompt that was
dropped and is started again counts as started once, because prompts with long answers would count again and again.
Answers that were started too late to be trained before the end count on neither side. `wasted` is the share of all
generated tokens that belong to answers which were dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.scaling.calibration import BASE, THINK
from benchmarks.scaling.setups import NO_DEADLINES, PromptLengthEnvironments, ResponseLengths, Workload
from rich.console import Console
from rich.table import Table

from headway.config import load_config
from headway.environments.base import Environment, EnvironmentFactory, Observation
from headway.flow.training_flow import AsyncTrainingFlow
from headway.monitor.event_log import LoggedEvent
from headway.settings import RunSettings
from headway.sim.simulated_run import Scenario, make_scenario, play_scenario
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import Generation, SamplingParams, Task

ROOT = Path(__file__).parents[1]
POLICIES: dict[str, dict[str, Any]] = {
    "drop-freshest": {"staleness_policy": "drop", "selection_order": "freshest"},
    "drop-oldest": {"staleness_policy": "drop", "selection_order": "oldest"},
    "window-B": {"staleness_policy": "window", "staleness_window": 1},
    "window-2B": {"staleness_policy": "window", "staleness_window": 2},
    "wait-depth-1": {"staleness_policy": "wait", "selection_order": "oldest", "pipeline_depth": 1.0},
    "wait-freshest": {"staleness_policy": "wait", "selection_order": "freshest"},
    "wait-oldest": {"staleness_policy": "wait", "selection_order": "oldest"},
}
SMALL = load_config(ROOT / "examples" / "simulate_small.yaml")
TAILS = {"short": (0.33, 0.33), "medium": (0.6, 0.6), "long": (0.9, 0.9)}
"""σ of the logarithm that the answers to a prompt share, and of each answer."""


def make_workloads() -> dict[str, tuple[Workload, int, int]]:
    """Return the simulated costs with the numbers of GPUs that train and generate."""
    simulation = replace(make_scenario(SMALL).simulation, reward=type(SMALL.config.simulation.reward)())
    found: dict[str, tuple[Workload, int, int]] = {}
    for name, (prompt_spread, spread) in TAILS.items():
        lengths = ResponseLengths(mean=1500, prompt_spread=prompt_spread, spread=spread, longest=32_768)
        found[name] = (Workload(name=name, lengths=lengths, simulation=simulation), 2, 6)
    found["think"] = (THINK, 2, 3)
    found["base"] = (BASE, 2, 2)
    return found


class RecordedEnvironment:
    """Records how long the simulator makes an answer."""

    def __init__(self, inner: Environment, lengths: dict[str, int]) -> None:
        self._inner, self._lengths = inner, lengths
        task = asyncio.current_task()
        self._sample = task.get_name() if task is not None else ""

    async def reset(self, task: Task) -> Observation:
        return self._record(await self._inner.reset(task))

    async def step(self, generation: Generation) -> Observation:
        return self._record(await self._inner.step(generation))

    async def close(self) -> None:
        await self._inner.close()

    def _record(self, observation: Observation) -> Observation:
        if not observation.done:
            self._lengths[self._sample] = self._lengths.get(self._sample, 0) + int(observation.hint or 0)
        return observation


@dataclass
class RunLengths:
    """Collects what a run started, trained and generated."""

    bound: int
    last_step: int
    lengths: dict[str, int] = field(default_factory=dict)
    """Length that each sample has when it is finished, by sample id."""
    started: dict[str, int] = field(default_factory=dict)
    """Trained version when the sample started."""
    again: set[int] = field(default_factory=set)
    """Groups whose prompt had been started before."""
    positions: set[int] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    ends_s: list[float] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    generated: int = 0
    version: int = 0

    def __call__(self, event: LoggedEvent) -> None:
        data = event.data
        match event.kind:
            case "group.start":
                if data["position"] in self.positions:
                    self.again.add(data["group"])
                self.positions.add(data["position"])
            case "sample.start":
                self.started[data["sample"]] = self.version
            case "sample.end":
                if data["end"] == "trained":
                    self.trained.add(data["sample"])
            case "request.end":
                self.generated += data["actions"]
            case "group.train":
                self.lags.append(data["trained"] - data["oldest"])
            case "step.end":
                self.version = data["trained"]
                self.ends_s.append(event.time_s)

    def make_row(self, warmup: int) -> dict[str, float]:
        """Return the numbers of the run."""
        early = [s for s, version in self.started.items() if version < self.last_step - self.bound - 1]
        early = [sample for sample in early if sample in self.lengths]
        kept = [sample for sample in early if sample in self.trained]
        first = [sample for sample in early if int(sample.split(".")[0]) not in self.again]
        started, trained = mean(self.lengths[s] for s in first), mean(self.lengths[s] for s in kept)
        useful = sum(self.lengths[s] for s in self.trained)
        measured_s = self.ends_s[warmup : len(self.ends_s) - self.bound]
        return {
            "step_s": (measured_s[-1] - measured_s[0]) / (len(measured_s) - 1),
            "lag": mean(self.lags),
            "started": started,
            "trained": trained,
            "bias": trained / started - 1,
            "dropped": 1 - len(kept) / len(early),
            "wasted": max(0.0, 1 - useful / self.generated),
            "tokens_per_s": useful / self.ends_s[-1],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCell:
    """One run of a table."""

    workload: str
    alpha: float
    policy: str
    settings: RunSettings
    seed: int
    warmup: int


def simulate(cell: SimulatedCell) -> dict[str, float]:
    """Simulate one run."""
    workload, train, infer = make_workloads()[cell.workload]
    lengths = workload.lengths
    assert lengths is not None
    scenario = Scenario(
        settings=replace(cell.settings, sampling=SamplingParams(max_new_tokens=lengths.longest)),
        simulation=workload.simulation,
        train_devices=tuple(range(train)),
        infer_devices=tuple(range(train, train + infer)),
        seed=cell.seed,
    )
    record = RunLengths(scenario.settings.bound, scenario.settings.max_steps)

    def prepare(flow: AsyncTrainingFlow) -> None:
        inner: EnvironmentFactory = PromptLengthEnvironments(lengths, workload.simulation, seed=cell.seed)
        flow.backends = replace(
            flow.backends, environments=lambda task: RecordedEnvironment(inner(task), record.lengths)
        )

    with TemporaryDirectory(prefix="headway-stragglers-") as scratch:
        play = play_scenario(scenario, run_dir=Path(scratch), sinks=[record], on_flow=prepare)
        summary = run_on_virtual_clock(play, max_time_s=1e9)
    if not summary.finished:
        raise RuntimeError(summary.reason)
    return record.make_row(cell.warmup)


def make_settings(args: argparse.Namespace, alpha: float, policy: str, steps: int) -> RunSettings:
    """Return the settings of one cell."""
    chosen = dict(POLICIES[policy])
    if "staleness_window" in chosen:
        chosen["staleness_window"] *= args.groups
    never = {"filter_zero_variance": False, "max_num_gen_batches": 0, "save_steps": 0, "save_total_limit": 0}
    return RunSettings(
        groups_per_step=args.groups,
        group_size=args.group_size,
        max_steps=steps,
        async_generation_ratio=alpha,
        eval_steps=0,
        reliability=NO_DEADLINES,
        **never,
        **chosen,
    )


def make_cells(args: argparse.Namespace) -> dict[tuple[str, float, str], list[SimulatedCell]]:
    """Return the runs by workload, α and policy, one for each seed. At α = 0 all policies are the same."""
    found = {}
    for name, alpha, policy in product(args.workloads, args.alphas, args.policies):
        same = alpha == 0 and policy != args.policies[-1]
        if not same and POLICIES[policy].get("pipeline_depth", 0) <= max(alpha - 1, 0):
            settings, seeds = make_settings(args, alpha, policy, args.steps), range(args.property or args.seeds)
            shared: dict[str, Any] = {"workload": name, "alpha": alpha, "policy": policy, "warmup": args.warmup}
            found[name, alpha, policy] = [SimulatedCell(**shared, settings=settings, seed=seed) for seed in seeds]
    return found


def main() -> None:
    """Simulate, print one table for each workload."""
    args = read_arguments()
    cells = make_cells(args)
    rows = []
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = {key: [pool.submit(simulate, cell) for cell in runs] for key, runs in cells.items()}
        for (name, alpha, policy), futures in jobs.items():
            found = [future.result() for future in futures]
            row: dict[str, Any] = {"workload": name, "alpha": alpha, "policy": policy, "seeds": len(found)}
            row |= {key: mean(one[key] for one in found) for key in found[0]}
            row["bias"], row["worst"] = (
                row["trained"] / row["started"] - 1,
                max((one["bias"] for one in found), key=abs),
            )
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in args.workloads:
        print_table(name, [row for row in rows if row["workload"] == name])


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows of one workload."""
    columns = ("α", "policy", "s/step", "lag", "started", "trained", "bias", "dropped", "wasted")
    table = Table(*columns, title=name)
    for row in rows:
        lengths = [f"{row[key]:,.0f}" for key in ("started", "trained")]
        shares = [f"{100 * row['bias']:+.1f} %", f"{row['dropped']:.1%}", f"{row['wasted']:.1%}"]
        table.add_row(
            f"{row['alpha']:g}", row["policy"], f"{row['step_s']:.1f}", f"{row['lag']:.2f}", *lengths, *shares
        )
    Console(width=120).print(table)


def read_arguments() -> argparse.Namespace:
    """Read what to simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=[*TAILS, "think", "base"])
    parser.add_argument("--alphas", nargs="+", type=float, default=[0, 0.5, 1, 1.5, 2, 3])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--property", type=int, default=0, help="seeds over which the bias is added up")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="where the rows go, one JSON object a line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
