"""Predicts asynchronous runs of AReaL and verl from their synchronous rows: published, predicted, ratio.

    python benchmarks/other_systems.py [--only verl-fully-async …] [--write]

The costs are calibrated on the synchronous row of the same hardware alone (`headway.sim.cost_calibration`, which is
what `headway simulate --calibrate` runs); nothing is fitted to an asynchronous row. What no row says is assumed once
per system, from the data sheets of model and chip, and stands in `ENGINES` and `LENGTHS`. A second prediction is given
the update seconds of the asynchronous row itself: it shows what of the error is the trainer's and what the scheduler's.
Exit code 0 always: this measures how well others can be predicted, it asserts nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from pathlib import Path

from headway.config import load_config
from headway.config.simulation_config import SimulationConfig
from headway.monitor.run_report import RunMonitor
from headway.sim.cost_calibration import MeasuredPhases, calibrate_costs
from headway.sim.folded_scenario import choose_fold, fold_scenario
from headway.sim.simulated_run import Scenario, make_scenario, run_scenario

PAGE = Path(__file__).parents[1] / "docs" / "results" / "other_systems.md"
TOLERANCE = 0.15
NO_DEADLINES = {
    f"reliability.{name}_timeout_s": 1e7
    for name in ("request", "episode", "train", "lock", "stall", "transfer", "environment", "reward")
}
ENGINES = {
    # A decode step: reading the weights (and 4 ms of host), computing a token, reading its share of the KV cache.
    "7B on H20": {"step_s": 0.008, "step_per_request_s": 0.00017, "step_per_context_token_s": 1.4e-8,
                  "prefill_tokens_per_s": 6_000, "slots": 1024, "kv_tokens": 1_000_000},
    "1.5B on H800": {"step_s": 0.005, "step_per_request_s": 0.00002, "step_per_context_token_s": 8.6e-9,
                     "prefill_tokens_per_s": 160_000, "slots": 512, "kv_tokens": 2_000_000},
    "7B on H800": {"step_s": 0.009, "step_per_request_s": 0.00003, "step_per_context_token_s": 1.7e-8,
                   "prefill_tokens_per_s": 32_000, "slots": 512, "kv_tokens": 800_000},
}  # fmt: skip
LENGTHS = {
    # A few of 8,192 answers reach the limit, as an 8 ms step and 247 s of generation for 20k tokens suggest.
    "verl": {"kind": "lognormal", "mean": 1000, "std": 1500, "min": 16},
    # 41.0 h for 250 steps at 128.7k tokens/s are 9,270 tokens for each of 8,192 answers.
    "AReaL": {"kind": "lognormal", "mean": 9270, "std": 7400, "min": 64},
}
CORRELATION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSync:
    """The synchronous row that a case is calibrated on, in seconds per step of 512 × 16 samples."""

    gpus: int
    engine: str
    lengths: str
    longest: int
    phases: MeasuredPhases
    rest: float = 0.0
    """What the row's step has beyond its phases: it does not shrink with more GPUs."""
    prompts: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One asynchronous row."""

    table: str
    row: str
    sync: PublishedSync
    train: int
    infer: int
    alpha: float
    """In steps of `parts`."""
    published: float | None
    """Seconds per step of 512 × 16 samples; `None` where only a plot exists."""
    parts: int = 1
    """Training steps between two weight syncs; together they train 512 prompts."""
    scheduling: str = "queue"
    update: float | None = None
    """Update seconds of the asynchronous row itself."""
    unit: str = "s/step"


def verl(gpus: int, gen: float, logp: float, update: float, step: float) -> PublishedSync:
    rest = step - gen - logp - update
    phases = MeasuredPhases(gen=gen, colocated_logp=logp, update=update, sync=1.0)
    return PublishedSync(gpus=gpus, engine="7B on H20", lengths="verl", longest=28_672, phases=phases, rest=rest)


VERL = {32: verl(32, 357.41, 107.71, 313.81, 790.10), 64: verl(64, 150.72, 70.26, 133.41, 365.28),
        128: verl(128, 177.85, 53.92, 113.81, 356.30)}  # fmt: skip
ONE_STEP_OFF = {
    "FSDP2": (20_480, MeasuredPhases(gen=247, switch=74, logp=88, update=286, sync=1.0), 749, 520, 337),
    "Megatron": (8_192, MeasuredPhases(gen=162, switch=45, logp=119, update=344, sync=1.0), 699, 566, 347),
}
"""Longest answer, phases and step of the synchronous row, step and update of the asynchronous one."""


def list_cases() -> Iterator[Case]:
    yield from list_areal_cases()
    for name, (longest, phases, step, published, update) in ONE_STEP_OFF.items():
        rest = step - sum(value or 0.0 for value in (phases.gen, phases.switch, phases.logp, phases.update))
        sync = PublishedSync(gpus=16, engine="7B on H20", lengths="verl", longest=longest, phases=phases, rest=rest)
        yield Case(
            table="verl one-step-off", row=f"{name}, 12T4I", sync=sync, train=12, infer=4, alpha=1,
            published=published, update=update, scheduling="batch",
        )  # fmt: skip
    rows = [(32, 0.5, 294.77, 269.80), (64, 0.5, 189.26, 156.98), (128, 0.0, 231.34, 98.77), (128, 0.1, 171.30, 109.12),
            (128, 0.3, 146.11, 103.22), (128, 0.5, 150.63, 113.16)]  # fmt: skip
    for gpus, threshold, published, update in rows:
        yield Case(
            table="verl fully asynchronous", row=f"{gpus} GPUs, threshold {threshold:g}", sync=VERL[gpus],
            train=gpus // 2, infer=gpus // 2, parts=4, alpha=4 * (1 + threshold) - 1,
            published=published, update=update,
        )  # fmt: skip


def list_areal_cases() -> Iterator[Case]:
    """Yield the rows of arXiv 2505.24298: 250 steps of 512 × 16, three quarters of the GPUs generate.

    Sync rows have no phases. Training is 8 operations for each weight and token at 35 % of the chip, the rest is
    generation.
    """
    tokens = 512 * 16 * 9270.0
    small, large = 41.0 * 3600 / 250, 57.7 * 3600 / 250
    small_train = 8 * 1.54e9 * tokens / (128 * 989e12 * 0.35)
    large_train = 8 * 7.6e9 * tokens / (192 * 989e12 * 0.35)
    sync = {
        "1.5B": PublishedSync(gpus=128, engine="1.5B on H800", lengths="AReaL", longest=27_648,
                              phases=MeasuredPhases(gen=small - small_train, update=small_train, sync=5.0)),
        "7B": PublishedSync(gpus=192, engine="7B on H800", lengths="AReaL", longest=27_648,
                            phases=MeasuredPhases(gen=large - large_train, update=large_train, sync=10.0)),
    }  # fmt: skip
    for eta in (1, 2, 4, 8, 16):
        last = eta == 16
        yield Case(
            table="AReaL staleness, 1.5B", row="η = ∞ (16 simulated)" if last else f"η = {eta}", sync=sync["1.5B"],
            train=32, infer=96, alpha=eta, published=396.8 if last else None, unit="k tokens/s",
        )  # fmt: skip
    yield Case(table="AReaL end to end", row="1.5B, 16 nodes, η = 8", sync=sync["1.5B"], train=32, infer=96, alpha=8,
               published=14.8 * 3600 / 250)  # fmt: skip
    yield Case(table="AReaL end to end", row="7B, 24 nodes, η = 8", sync=sync["7B"], train=48, infer=144, alpha=8,
               published=25.4 * 3600 / 250)  # fmt: skip


# -- simulation


def load_case(case: Case, costs: dict[str, float], *, update: float | None = None) -> Scenario:
    """Return the scenario of a case with calibrated costs, and with the update seconds of its own row if given."""
    options = {
        **NO_DEADLINES,
        "seed": 1,
        "rollout_batch_size": case.sync.prompts // case.parts,
        "num_return_sequences_in_group": 16,
        "response_length": case.sync.longest,
        "filter_zero_variance": False,
        "eval_steps": 0,
        "async_generation_ratio": case.alpha,
        "updates_per_sync": case.parts,
        "rollout_scheduling": case.scheduling,
        "pg_variant": "tis",
        "actor_train.training_args.gradient_accumulation_steps": 1,
        "actor_train.device_mapping": [0],
        "actor_infer.device_mapping": [1],
        **{f"simulation.engine.{key}": value for key, value in ENGINES[case.sync.engine].items()},
        "simulation.response_tokens": {**LENGTHS[case.sync.lengths], "max": case.sync.longest},
        "simulation.response_correlation": CORRELATION,
        "simulation.weights.recompute_cache": True,
    }
    scenario = make_scenario(load_config(options, costs))
    trainer = replace(scenario.simulation.trainer, fixed_s=case.sync.rest / case.parts, save_s=0.0)
    simulation = replace(scenario.simulation, trainer=trainer)
    if update is not None:
        per_token = update * case.train / count_tokens(case.sync)
        simulation = replace(simulation, trainer=replace(simulation.trainer, gpu_s_per_token=per_token))
    return replace(
        scenario,
        simulation=simulation,
        train_devices=tuple(range(case.train)),
        infer_devices=tuple(range(case.train, case.train + case.infer)),
    )


CALIBRATED: dict[tuple[object, ...], tuple[dict[str, float], float]] = {}


def calibrate(sync: PublishedSync) -> dict[str, float]:
    """Return the costs of a synchronous row."""
    key = (sync.gpus, sync.engine, sync.longest, sync.phases.gen)
    if key not in CALIBRATED:
        case = Case(table="", row="", sync=sync, train=1, infer=1, alpha=0, published=None)
        scenario = replace(load_case(case, {}), simulation=without_fixed(load_case(case, {}).simulation))
        costs = calibrate_costs(scenario, replace(sync.phases, gpus=float(sync.gpus)))
        tokens = (sync.phases.update or 0.0) * sync.gpus / costs["simulation.trainer.gpu_s_per_token"]
        CALIBRATED[key] = costs, tokens
    return CALIBRATED[key][0]


def without_fixed(simulation: SimulationConfig) -> SimulationConfig:
    return replace(simulation, trainer=replace(simulation.trainer, fixed_s=0.0))


def count_tokens(sync: PublishedSync) -> float:
    """Return the tokens of a step of 512 × 16 samples."""
    calibrate(sync)
    return CALIBRATED[sync.gpus, sync.engine, sync.longest, sync.phases.gen][1]


def simulate_tokens_per_s(scenario: Scenario, parts: int) -> float:
    """Return the tokens trained per second in some whole cycles after the pipeline has filled."""
    alpha = scenario.settings.async_generation_ratio
    warmup = 2 * parts * ceil((alpha + 1) / parts)
    steps = warmup + max(parts * 3, 6)
    scenario = replace(scenario, settings=replace(scenario.settings, max_steps=steps, save_steps=0))
    monitor = RunMonitor(warmup)
    fold = 4 if scenario.engines == 4 else choose_fold(scenario)
    summary = run_scenario(fold_scenario(scenario, fold), sinks=[monitor])
    if not summary.finished:
        raise RuntimeError(summary.reason)
    return monitor.report().throughput.actions_per_s * fold


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A row of the result."""

    case: Case
    predicted: float
    given_update: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.case.published is None else self.predicted / self.case.published

    @property
    def is_within(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= TOLERANCE


def predict(case: Case) -> Prediction:
    costs = calibrate(case.sync)

    def run(update: float | None) -> float:
        speed = simulate_tokens_per_s(load_case(case, costs, update=update), case.parts)
        return speed / 1000 if case.unit == "k tokens/s" else count_tokens(case.sync) / speed

    given = None if case.update is None else run(case.update)
    return Prediction(case=case, predicted=run(None), given_update=given)


# -- the page


def format_row(one: Prediction) -> str:
    published = "plot only" if one.case.published is None else f"{one.case.published:.1f}"
    ratio = "–" if one.ratio is None else f"{one.ratio:.2f}{'' if one.is_within else ' ✗'}"
    given = ("–", "–")
    if one.given_update is not None and one.case.published is not None:
        given = (f"{one.given_update:.1f}", f"{one.given_update / one.case.published:.2f}")
    cells = (one.case.table, one.case.row, one.case.unit, published, f"{one.predicted:.1f}", ratio, *given)
    return "| " + " | ".join(cells) + " |"


def format_page(found: list[Prediction], seconds: float) -> str:
    rows = [one for one in found if one.ratio is not None]
    within = sum(one.is_within for one in rows)
    given = [one for one in rows if one.given_update is not None]
    close = sum(abs((one.given_update or 0.0) / (one.case.published or 1.0) - 1) <= TOLERANCE for one in given)
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=PAGE.parent, capture_output=True, text=True, check=False)
    lines = [
        "# Runs of other systems, predicted",
        "",
        INTRODUCTION,
        f"{datetime.now(UTC):%Y-%m-%d}, commit {done.stdout.strip() or 'unknown'}, seed 1, two cores, {seconds:.0f} s. "
        "Made by `python benchmarks/other_systems.py --write`.",
        "",
        f"**{within} of {len(rows)} asynchronous rows are within 15 %, predicted from synchronous rows alone; "
        f"{close} of {len(given)} are once the update seconds of the row itself are given.**",
        "",
        "| table | row | unit | published | predicted | ratio | given its update | ratio |",
        "|---|---|---|---:|---:|---:|---:|---:|",
        *(format_row(one) for one in found),
    ]
    return "\n".join(lines) + "\n"


INTRODUCTION = """Published asynchronous runs of AReaL (arXiv 2505.24298) and verl (its pages on one-step-off and fully
asynchronous training) against the real scheduler on the virtual clock. Costs come from the **synchronous** row of the
same hardware alone, as `headway simulate --calibrate` takes them; nothing was fitted to an asynchronous row.

verl's keys mean here: `rollout_batch_size` = `require_batches × ppo_mini_batch_size`, `updates_per_sync` =
`trigger_parameter_sync_step`, `async_generation_ratio` = `trigger_parameter_sync_step × (1 + staleness_threshold) − 1`.
A step of the table is the 512 prompts between two syncs. Seconds are those of a step with as many tokens as the
synchronous one.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--only", action="append", default=[], help="tables whose name begins so; may be repeated")
    options = parser.parse_args()
    started_s, found = time.monotonic(), []
    for case in list_cases():
        if not options.only or any(case.table.startswith(name) for name in options.only):
            found.append(predict(case))
            print(format_row(found[-1]), flush=True)
    if options.write:
        PAGE.write_text(format_page(found, time.monotonic() - started_s), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
