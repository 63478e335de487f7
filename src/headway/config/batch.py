"""Batch arithmetic: how one training step is cut into optimizer steps, micro-batches and devices.

    samples per step = optimizer steps × per_device_train_batch_size × gradient_accumulation_steps × data parallel
    data parallel    = devices of actor_train / (tensor · pipeline · context parallel)
    replicas         = devices of actor_infer / (tensor · pipeline parallel)

What does not come out even is refused with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.config.document import Entry
from headway.config.draft import Draft
from headway.errors import ConfigError

_ACCUMULATION = "actor_train.training_args.gradient_accumulation_steps"
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
}
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """What one training step consumes."""

    per_step: int
    size: int
    members_started: int
    additional: int

    @property
    def samples(self) -> int:
        """Samples of one training step."""
        return self.per_step * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One training step on the devices that do it."""

    data_parallel: int
    replicas: int
    mini_batch_samples: int
    optimizer_steps: int


def cut(draft: Draft, devices: Mapping[str, tuple[int, ...]], groups: Groups, mini_batch: Entry | None) -> Cut:
    """The arithmetic of one step; derives gradient_accumulation_steps where it is not given.

    `mini_batch` is the size of an optimizer step in prompts, as the second dialect gives it.
    """
    training = draft.config.actor_train.training_args
    ways, replicas = _copies(draft, "actor_train", devices), _copies(draft, "actor_infer", devices)
    micro = training.per_device_train_batch_size
    if training.gradient_accumulation_steps is None:
        samples, reason = groups.samples, f"{groups.samples} samples / ({micro} per device × {ways} data parallel)"
        if mini_batch is not None:
            samples, reason = _translated(draft, mini_batch, groups, micro * ways)
        draft.derive(_ACCUMULATION, max(1, samples // (micro * ways)), reason)
    accumulation = draft.config.actor_train.training_args.gradient_accumulation_steps or 1
    one_step = micro * accumulation * ways
    if groups.samples % one_step:
        batch = f"{groups.per_step} groups × {groups.size} members = {groups.samples} samples"
        factors = f"{micro} per device × {accumulation} accumulation × {ways} data parallel = {one_step}"
        hint = "change the batch, per_device_train_batch_size or gradient_accumulation_steps of actor_train"
        draft.refuse("rollout_batch_size", f"batch not divisible: {batch}, one optimizer step takes {factors}", hint)
    return Cut(
        data_parallel=ways,
        replicas=replicas,
        mini_batch_samples=one_step,
        optimizer_steps=max(1, groups.samples // one_step) * draft.config.ppo_epochs,
    )


def _copies(draft: Draft, role: str, devices: Mapping[str, tuple[int, ...]]) -> int:
    """How many copies of the model a role holds."""
    sizes = (
        draft.config.actor_train if role == "actor_train" else draft.config.actor_infer
    ).strategy_args.strategy_config
    cut = ("tensor", "pipeline", "context") if role == "actor_train" else ("tensor", "pipeline")
    factors = {name: int(getattr(sizes, _SIZES[name])) for name in cut}
    one, count = math.prod(factors.values()), len(devices[role])
    if count % one:
        product = " × ".join(f"{name} {size}" for name, size in factors.items())
        problem = f"{count} devices are not whole copies of the model, one copy takes {product} = {one}"
        largest = max(factors, key=lambda name: factors[name])
        hint = f"1, or a multiple of {one} devices in {role}.device_mapping"
        draft.refuse(f"{role}.strategy_args.strategy_config.{_SIZES[largest]}", problem, hint)
    return max(1, count // one)


def _translated(draft: Draft, mini_batch: Entry, groups: Groups, unit: int) -> tuple[int, str]:
    """Samples of one optimizer step, given in prompts."""
    prompts = mini_batch.value
    if isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1:
        problem = f"is not a count of prompts [{mini_batch.origin}]"
        draft.problems.append(ConfigError(problem, key=_MINI_BATCH, value=prompts, hint="expected an integer ≥ 1"))
        return groups.samples, "the whole batch"
    samples = prompts * groups.size
    if samples % unit:
        problem = f"{prompts} prompts × {groups.size} members = {samples} samples, not divisible by {unit}"
        hint = f"micro-batch × data parallel = {unit}"
        draft.problems.append(ConfigError(problem, key=_MINI_BATCH, value=prompts, hint=hint))
    return samples, f"translated from {_MINI_BATCH} ({mini_batch.origin})"
