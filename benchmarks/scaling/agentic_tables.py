"""Simulates the tables of agents in environments, 1,024 GPUs, the paper's bound, and a case that loses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.scaling import calibration, published
from benchmarks.scaling.cells import Cell
from benchmarks.scaling.setups import Setup, Workload, simulate_step_s
from benchmarks.scaling.training_tables import make_settings, simulate_asynchronous_s, simulate_synchronous_s

from headway.config import ReliabilityConfig

TABLE_BOUND = "bound"


def simulate_environment_async() -> Iterator[Cell]:
    """Speed-up of agents that do not wait for each other after every turn, batch 512."""
    for (mean_s, std_s), figure in published.ENVIRONMENT.items():
        workload = calibration.make_environment_workload(mean_s, std_s)
        barrier_s, free_s = (
            simulate_step_s(
                Setup(
                    workload=workload, settings=make_settings(512, size=1, env_scheduling=scheduling), train=1, infer=1
                )
            )
            for scheduling in ("barrier", "async")
        )
        yield Cell(
            table="environment async",
            row=workload.name,
            column="speed-up",
            published=figure,
            simulated=barrier_s / free_s,
        )


def simulate_redundant() -> Iterator[Cell]:
    """32 × 8 against 36 × 12, with and without environments that hang and are only ended by a timeout.

    45 s are four turns of 10 s. Without hangs the other 200 s have no cause; one step in 300 that never returns, and
    a timeout of three minutes, are enough.
    """
    for name, hang in (("no hangs", 0.0), ("hangs", 0.003)):
        workload = calibration.make_environment_workload(10, 5, turns=4, hang=hang)
        reliability = ReliabilityConfig(environment_timeout_s=180.0)
        plain_s, spare_s = (
            simulate_step_s(
                Setup(
                    workload=workload,
                    settings=make_settings(
                        32,
                        size=8,
                        steps=4,
                        reliability=reliability,
                        additional_groups=groups,
                        redundant_members=members,
                    ),
                    train=1,
                    infer=1,
                )
            )
            for groups, members in ((0, 0), (4, 4))
        )
        for column, figure, taken_s in zip(("32×8", "36×12"), published.REDUNDANT, (plain_s, spare_s), strict=True):
            yield Cell(
                table="redundant environments", row=name, column=column, published=figure, simulated=taken_s,
                checked=False,
            )  # fmt: skip


def simulate_tasks() -> Iterator[Cell]:
    """Hours per 50 steps of three agentic tasks: 32 + 32 GPUs, 8 groups of 16, redundant 9 of 17."""
    spare = {"additional_groups": 1, "redundant_members": 1}
    variants: dict[str, dict[str, Any]] = {
        "sync": {"env_scheduling": "barrier"},
        "+ env async": {},
        "+ redundant": spare,
        "async": {"alpha": 1},
        "async + redundant": {"alpha": 1, **spare},
    }
    for task, figures in published.AGENTIC.items():
        for (column, how), figure in zip(variants.items(), figures, strict=True):
            run = Setup(
                workload=calibration.AGENTIC[task],
                settings=make_settings(8, size=16, steps=6, **how),
                train=32,
                infer=32,
                warmup=2,
            )
            hours = simulate_step_s(run) * 50 / 3600
            yield Cell(table="agentic tasks", row=task, column=column, published=figure, simulated=hours, checked=False)


def compute_bound() -> Iterator[Cell]:
    """The paper's upper bound (N/K)(μ_gen + μ_train) + L/(α + 1), in place of a published figure."""
    think = calibration.THINK
    engine, trainer = think.simulation.engine, think.simulation.trainer
    assert think.lengths is not None
    mean = 11_000
    step_s = engine.step_s + engine.step_per_request_s * engine.slots
    generate_s = mean * step_s / engine.slots
    train_s = mean * (trainer.gpu_s_per_token + think.simulation.ref_logp.gpu_s_per_token)
    longest_s = think.lengths.longest * step_s
    for alpha in (1, 2, 3):
        limit_s = 256 * 16 / 40 * (generate_s + train_s) + longest_s / (alpha + 1)
        yield Cell(
            table=TABLE_BOUND,
            row=f"α = {alpha}",
            column="16T24I s/step",
            published=limit_s,
            simulated=simulate_asynchronous_s(think, 16, 24, alpha=alpha),
            checked=False,
        )


def simulate_large() -> Iterator[Cell]:
    """Up to 1,024 GPUs at the published batch: throughput per GPU against 16 GPUs, each at the best of three splits."""
    for model in ("think", "base"):
        workload = replace(calibration.MODELS[model], fold_to=32)
        unit, _ = find_best_split(replace(workload, fold_to=128), 16)
        for gpus in (256, 512, 1024):
            best_s, train = find_best_split(workload, gpus)
            row = f"{model}, {gpus} GPUs ({train}T{gpus - train}I)"
            deeper_s = simulate_asynchronous_s(workload, train, gpus - train, alpha=6, warmup=8)
            for column, taken_s in (("linearity, α = 2", best_s), ("linearity, α = 6", deeper_s)):
                yield Cell(
                    table="beyond the paper",
                    row=row,
                    column=column,
                    published=None,
                    simulated=unit / taken_s / (gpus / 16),
                    checked=False,
                )


def find_best_split(workload: Workload, gpus: int) -> tuple[float, int]:
    """Return seconds per step of the best split among a few, and its GPUs for training."""
    candidates = [gpus // 4, gpus * 3 // 8, gpus // 2]
    return min((simulate_asynchronous_s(workload, train, gpus - train, warmup=8), train) for train in candidates)


def simulate_losing() -> Iterator[Cell]:
    """Asynchrony can lose: where training is most of the work, half of the GPUs for generation is too many."""
    sync_s = simulate_synchronous_s(calibration.LOSING, 32, 128)
    async_s = simulate_asynchronous_s(calibration.LOSING, 16, 16, groups=128, alpha=1)
    for column, figure, taken_s in zip(("sync", "async 1:1"), published.LOSING, (sync_s, async_s), strict=True):
        yield Cell(
            table="asynchrony loses",
            row="30B, 32 GPUs",
            column=column,
            published=figure,
            simulated=taken_s,
            checked=False,
        )
