"""The tables of language-model training: GPU count, resource split, batch, α, queue scheduling, replication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headway.settings import RunSettings

from . import calibration, published
from .cells import Cell
from .world import PATIENT, Setup, Workload, step_seconds

FULL = False
"""Without folding: every prompt and GPU of the paper is simulated. Set by `--full`."""


def settings(groups: int, *, size: int = 16, steps: int = 1, alpha: float = 0, **other: Any) -> RunSettings:
    """Settings of a run without filtering and without deadlines."""
    never = {"filter_zero_variance": False, "max_num_gen_batches": 0, "save_steps": 0, "save_total_limit": 0}
    other = {**never, "eval_steps": 0, "seed": 0, "reliability": PATIENT, **other}
    return RunSettings(groups_per_step=groups, group_size=size, max_steps=steps, async_generation_ratio=alpha, **other)


def synchronous(workload: Workload, gpus: int, groups: int = 256, *, naive: bool = False) -> float:
    """Seconds per step when trainer and engines take turns. Naive: whole groups on one worker, whole batches."""
    how: dict[str, Any] = {"rollout_scheduling": "batch", "is_num_return_sequences_expand": False} if naive else {}
    steps = max(128 // groups, 1)
    return step_seconds(Setup(workload=workload, settings=settings(groups, steps=steps, **how), train=gpus))


def asynchronous(
    workload: Workload, train: int, infer: int, *, groups: int = 256, alpha: float = 2, warmup: int = 4
) -> float:
    """Seconds per step with pools of their own.

    The warm-up is longer than α, so that what was started at once in the beginning is used up. Runs that are compared
    have the same one: they then measure the same steps, whose prompts make a difference of some per cent.
    """
    fold = 1 if FULL else max(groups // workload.fold_to, 1)
    steps = warmup + max(384 // groups, 8)
    return step_seconds(
        Setup(
            workload=workload,
            settings=settings(groups, steps=steps, alpha=alpha),
            train=train,
            infer=infer,
            warmup=warmup,
            fold=fold,
        )
    )


def gpu_count(model: str) -> Iterator[Cell]:
    """Throughput relative to asynchronous training on 16 GPUs."""
    workload = calibration.MODELS[model]
    unit = asynchronous(workload, 8, 8)
    for gpus, figures in published.GPU_COUNT[model].items():
        seconds = (
            asynchronous(workload, gpus // 2, gpus // 2),
            synchronous(workload, gpus),
            synchronous(workload, gpus, naive=True),
        )
        for column, figure, taken_s in zip(("async", "sync queue", "sync naive"), figures, seconds, strict=True):
            yield Cell(
                table=f"GPU count, {model}",
                row=f"{gpus} GPUs",
                column=column,
                published=figure,
                simulated=unit / taken_s,
            )


def split() -> Iterator[Cell]:
    """Seconds per step on 40 GPUs."""
    table, think = "resource split", calibration.THINK
    sync_s = synchronous(think, 40, naive=True)
    yield Cell(table=table, row="sync", column="s/step", published=published.SPLIT_SYNC, simulated=sync_s)
    for (train, infer), figure in published.SPLIT.items():
        taken_s = asynchronous(think, train, infer)
        yield Cell(table=table, row=f"{train}T{infer}I", column="s/step", published=figure, simulated=taken_s)


def batch() -> Iterator[Cell]:
    """Seconds per step by prompts per step, 40 GPUs."""
    think = calibration.THINK
    for groups, figures in published.BATCH.items():
        seconds = (
            synchronous(think, 40, groups, naive=True),
            asynchronous(think, 16, 24, groups=groups),
            asynchronous(think, 8, 32, groups=groups),
        )
        for column, figure, taken_s in zip(("sync", "16T24I", "8T32I"), figures, seconds, strict=True):
            yield Cell(table="batch", row=str(groups), column=column, published=figure, simulated=taken_s)


def alpha() -> Iterator[Cell]:
    """Throughput over synchronous training on the same 40 GPUs."""
    think = calibration.THINK
    sync_s = synchronous(think, 40, naive=True)
    for bound, figure in published.ALPHA_SPEEDUP.items():
        taken_s = asynchronous(think, 16, 24, alpha=bound)
        yield Cell(table="alpha", row=f"α = {bound}", column="speed-up", published=figure, simulated=sync_s / taken_s)


def alpha_needed() -> Iterator[Cell]:
    """The smallest α within 5 % of what α = 5 gives; by longest response and by batch, 16T24I."""
    think, table = calibration.THINK, "alpha needed"
    assert think.lengths is not None
    for longest, figure in published.ALPHA_BY_LENGTH.items():
        needed = saturation(replace(think, lengths=think.lengths.scaled(longest), fold_to=32), groups=256)
        row = f"{longest // 1024}k tokens"
        yield Cell(table=table, row=row, column="α", published=figure, simulated=needed, checked=False)
    for groups, figure in published.ALPHA_BY_BATCH.items():
        needed = saturation(replace(think, fold_to=32), groups=groups)
        yield Cell(table=table, row=f"{groups} prompts", column="α", published=figure, simulated=needed, checked=False)


def saturation(workload: Workload, *, groups: int) -> int:
    """The α from which more gives less than 5 %."""

    def seconds(bound: int) -> float:
        return asynchronous(workload, 16, 24, groups=groups, alpha=bound, warmup=8)

    best_s = seconds(5)
    return next((bound for bound in (1, 2, 3, 4) if seconds(bound) <= 1.05 * best_s), 5)


def queue() -> Iterator[Cell]:
    """Generation seconds with zero-variance groups dropped: whole-batch rounds / queue + spares / queue."""
    for groups, figures in published.QUEUE.items():
        common: dict[str, Any] = {"size": 8, "filter_zero_variance": True}
        rounds = {
            "rollout_scheduling": "rounds",
            "staleness_policy": "wait",
            "additional_groups": groups,
            "is_num_return_sequences_expand": False,
        }
        variants: dict[str, dict[str, Any]] = {"batch": rounds, "queue + 16": {"additional_groups": 16}, "queue": {}}
        for (column, how), figure in zip(variants.items(), figures, strict=True):
            one = Setup(
                workload=calibration.QUEUE,
                settings=settings(groups, **common, **how),
                train=1,
                infer=calibration.QUEUE_GPUS,
            )
            taken_s = first_step_seconds(one, seeds=max(400 // groups, 6))
            yield Cell(table="queue scheduling", row=f"{groups}×8", column=column, published=figure, simulated=taken_s)


def first_step_seconds(setup: Setup, *, seeds: int) -> float:
    """The first step alone, over many seeds.

    Prompts of cancelled groups come back later in a run of the flow, and they are the long ones; the paper measures
    steps whose prompts are drawn afresh.
    """
    return sum(step_seconds(replace(setup, seed=seed)) for seed in range(seeds)) / seeds


def replication() -> Iterator[Cell]:
    """Generation seconds with whole groups on one worker, and with members placed one by one."""
    for (groups, size), figures in published.REPLICATION.items():
        for column, figure in zip(("without", "with"), figures, strict=True):
            how = settings(groups, size=size, steps=8, is_num_return_sequences_expand=column == "with")
            taken_s = step_seconds(
                Setup(workload=calibration.REPLICATION, settings=how, train=1, infer=calibration.REPLICATION_GPUS)
            )
            yield Cell(table="replication", row=f"{groups}×{size}", column=column, published=figure, simulated=taken_s)
