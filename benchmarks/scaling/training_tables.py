"""Simulates the tables of language-model training: GPU count, split, batch, α, queue scheduling, replication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.scaling import calibration, published
from benchmarks.scaling.cells import Cell
from benchmarks.scaling.setups import NO_DEADLINES, Setup, Workload, simulate_step_s

from headway.settings import RunSettings

FULL = False
"""Whether every prompt and GPU of the paper is simulated, without folding. Set by `--full`."""


def make_settings(groups: int, *, size: int = 16, steps: int = 1, alpha: float = 0, **other: Any) -> RunSettings:
    """Return settings of a run without filtering and without deadlines, which drops stragglers as the paper's does."""
    never = {"filter_zero_variance": False, "max_num_gen_batches": 0, "save_steps": 0, "save_total_limit": 0}
    other = {"staleness_policy": "drop", "selection_order": "freshest", **other}
    other = {**never, "eval_steps": 0, "seed": 0, "reliability": NO_DEADLINES, **other}
    return RunSettings(groups_per_step=groups, group_size=size, max_steps=steps, async_generation_ratio=alpha, **other)


def simulate_synchronous_s(workload: Workload, gpus: int, groups: int = 256, *, naive: bool = False) -> float:
    """Return seconds per step if trainer and engines take turns; `naive` places whole groups and whole batches."""
    how: dict[str, Any] = {"rollout_scheduling": "batch", "is_num_return_sequences_expand": False} if naive else {}
    steps = max(128 // groups, 1)
    return simulate_step_s(Setup(workload=workload, settings=make_settings(groups, steps=steps, **how), train=gpus))


def simulate_asynchronous_s(
    workload: Workload, train: int, infer: int, *, groups: int = 256, alpha: float = 2, warmup: int = 4
) -> float:
    """Return seconds per step with separate pools of GPUs.

    The warm-up is longer than α, so that the groups started at once in the beginning are used up. Runs that are
    compared have the same warm-up: they measure the same steps, whose prompts make a difference of some per cent.
    """
    fold = 1 if FULL else max(groups // workload.fold_to, 1)
    steps = warmup + max(384 // groups, 8)
    return simulate_step_s(
        Setup(
            workload=workload,
            settings=make_settings(groups, steps=steps, alpha=alpha),
            train=train,
            infer=infer,
            warmup=warmup,
            fold=fold,
        )
    )


def simulate_gpu_count(model: str) -> Iterator[Cell]:
    """Throughput relative to asynchronous training on 16 GPUs."""
    workload = calibration.MODELS[model]
    unit = simulate_asynchronous_s(workload, 8, 8)
    for gpus, figures in published.GPU_COUNT[model].items():
        seconds = (
            simulate_asynchronous_s(workload, gpus // 2, gpus // 2),
            simulate_synchronous_s(workload, gpus),
            simulate_synchronous_s(workload, gpus, naive=True),
        )
        for column, figure, taken_s in zip(("async", "sync queue", "sync naive"), figures, seconds, strict=True):
            yield Cell(
                table=f"GPU count, {model}",
                row=f"{gpus} GPUs",
                column=column,
                published=figure,
                simulated=unit / taken_s,
            )


def simulate_split() -> Iterator[Cell]:
    """Seconds per step on 40 GPUs."""
    table, think = "resource split", calibration.THINK
    sync_s = simulate_synchronous_s(think, 40, naive=True)
    yield Cell(table=table, row="sync", column="s/step", published=published.SPLIT_SYNC, simulated=sync_s)
    for (train, infer), figure in published.SPLIT.items():
        taken_s = simulate_asynchronous_s(think, train, infer)
        yield Cell(table=table, row=f"{train}T{infer}I", column="s/step", published=figure, simulated=taken_s)


def simulate_batch() -> Iterator[Cell]:
    """Seconds per step by prompts per step, 40 GPUs."""
    think = calibration.THINK
    for groups, figures in published.BATCH.items():
        seconds = (
            simulate_synchronous_s(think, 40, groups, naive=True),
            simulate_asynchronous_s(think, 16, 24, groups=groups),
            simulate_asynchronous_s(think, 8, 32, groups=groups),
        )
        for column, figure, taken_s in zip(("sync", "16T24I", "8T32I"), figures, seconds, strict=True):
            yield Cell(table="batch", row=str(groups), column=column, published=figure, simulated=taken_s)


def simulate_alpha() -> Iterator[Cell]:
    """Throughput over synchronous training on the same 40 GPUs."""
    think = calibration.THINK
    sync_s = simulate_synchronous_s(think, 40, naive=True)
    for bound, figure in published.ALPHA_SPEEDUP.items():
        taken_s = simulate_asynchronous_s(think, 16, 24, alpha=bound)
        yield Cell(table="alpha", row=f"α = {bound}", column="speed-up", published=figure, simulated=sync_s / taken_s)


def simulate_alpha_needed() -> Iterator[Cell]:
    """Yield the smallest α within 5 % of α = 5, by longest response and by batch, 16T24I."""
    think, table = calibration.THINK, "alpha needed"
    assert think.lengths is not None
    for longest, figure in published.ALPHA_BY_LENGTH.items():
        needed = find_saturating_alpha(replace(think, lengths=think.lengths.scale_to(longest), fold_to=32), groups=256)
        row = f"{longest // 1024}k tokens"
        yield Cell(table=table, row=row, column="α", published=figure, simulated=needed, checked=False)
    for groups, figure in published.ALPHA_BY_BATCH.items():
        needed = find_saturating_alpha(replace(think, fold_to=32), groups=groups)
        yield Cell(table=table, row=f"{groups} prompts", column="α", published=figure, simulated=needed, checked=False)


def find_saturating_alpha(workload: Workload, *, groups: int) -> int:
    """Return the α beyond which more gives less than 5 %."""

    def seconds(bound: int) -> float:
        return simulate_asynchronous_s(workload, 16, 24, groups=groups, alpha=bound, warmup=8)

    best_s = seconds(5)
    return next((bound for bound in (1, 2, 3, 4) if seconds(bound) <= 1.05 * best_s), 5)


def simulate_queue() -> Iterator[Cell]:
    """Generation seconds with zero-variance groups dropped: whole-batch rounds / queue + spares / queue."""
    for groups, figures in published.QUEUE.items():
        common: dict[str, Any] = {"size": 8, "filter_zero_variance": True}
        rounds = {
            "rollout_scheduling": "rounds",
            "staleness_policy": "rounds",
            "additional_groups": groups,
            "is_num_return_sequences_expand": False,
        }
        variants: dict[str, dict[str, Any]] = {"batch": rounds, "queue + 16": {"additional_groups": 16}, "queue": {}}
        for (column, how), figure in zip(variants.items(), figures, strict=True):
            one = Setup(
                workload=calibration.QUEUE,
                settings=make_settings(groups, **common, **how),
                train=1,
                infer=calibration.QUEUE_GPUS,
            )
            taken_s = simulate_first_step_s(one, seeds=max(400 // groups, 6))
            yield Cell(table="queue scheduling", row=f"{groups}×8", column=column, published=figure, simulated=taken_s)


def simulate_first_step_s(setup: Setup, *, seeds: int) -> float:
    """Return seconds of the first step alone, averaged over many seeds.

    Prompts of cancelled groups come back later in a run of the flow, and they are the long ones; the paper measures
    steps whose prompts are drawn afresh.
    """
    return sum(simulate_step_s(replace(setup, seed=seed)) for seed in range(seeds)) / seeds


def simulate_replication() -> Iterator[Cell]:
    """Generation seconds with whole groups on one worker, and with members placed one by one."""
    for (groups, size), figures in published.REPLICATION.items():
        for column, figure in zip(("without", "with"), figures, strict=True):
            how = make_settings(groups, size=size, steps=8, is_num_return_sequences_expand=column == "with")
            taken_s = simulate_step_s(
                Setup(workload=calibration.REPLICATION, settings=how, train=1, infer=calibration.REPLICATION_GPUS)
            )
            yield Cell(table="replication", row=f"{groups}×{size}", column=column, published=figure, simulated=taken_s)
