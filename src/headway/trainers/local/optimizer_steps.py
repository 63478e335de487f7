"""What every learner does alike, whatever it learns from: all or nothing, one optimizer step after the other.

Guarantees: any error before the weights are touched is a `TrainerError`; one that strikes while they are moved leaves
`broken` set, and whoever owns the learner must throw it away. Nothing is changed before `CommitGate.commit`, and behind it
only by optimizer steps. Where a batch makes several, a copy from before the first is put back if a later one fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from headway.errors import TrainerError
from headway.trainers.local.local_optimizer import Optimizer, copy_tensors, overwrite_tensors
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.training_thread import CommitGate, JobAbandoned
from headway.types import Batch

T = TypeVar("T")
R = TypeVar("R")


class StepLearner(ABC):
    """Versions, one a batch."""

    def __init__(self) -> None:
        self.version = 0
        self.broken = False

    def learn(self, batch: Batch, gate: CommitGate) -> dict[str, float]:
        """One update; `version` is one higher afterwards."""
        if batch.trained != self.version:
            raise TrainerError(f"a batch for version {batch.trained}, the trainer is at {self.version}")
        try:
            return self._learn(batch, gate)
        except (TrainerError, JobAbandoned):
            raise
        except Exception as error:
            self.broken = gate.committed
            raise TrainerError(f"step {batch.trained + 1}: {type(error).__name__}: {error}") from error

    @abstractmethod
    def _learn(self, batch: Batch, gate: CommitGate) -> dict[str, float]: ...


class OptimizerStepReport(Protocol):
    """What is reported of optimizer steps."""

    steps: int
    grad_norm: float
    learning_rate: float


def retry_on_oom(work: Callable[[], T], shrink: Callable[[str], None], device: str) -> T:
    """What `work` gives. Where memory runs out, `shrink` is told why and makes it need less, or raises."""
    while True:
        try:
            return work()
        except torch.OutOfMemoryError as error:
            failure = str(error).partition("\n")[0]
        shrink(failure)  # outside: the error holds on to what is to be freed
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()


def iterate_mini_batches(rows: Sequence[R], settings: LocalSettings) -> Iterator[Sequence[R]]:
    """The rows of each optimizer step, epoch after epoch."""
    size = settings.mini_batch_samples or len(rows)
    for _ in range(settings.epochs):
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def apply_optimizer_steps(
    optimizers: Sequence[Optimizer],
    minis: Sequence[Sequence[R]],
    gradients: Callable[[Sequence[R]], None],
    report: OptimizerStepReport,
    version: int,
    gate: CommitGate,
) -> None:
    """All optimizer steps of one batch, or none. `gradients` adds up those of one mini-batch."""
    backup = [copy_tensors(one.everything()) for one in optimizers] if len(minis) > 1 else []
    try:
        for rows in minis:
            gradients(rows)
            norms = [one.ready(f"step {version + 1}") for one in optimizers]
            gate.commit()
            rates = [one.step(version) for one in optimizers]
            for one in optimizers:
                one.forget()
            report.steps += 1
            report.grad_norm += norms[0]
            report.learning_rate = rates[0]
    except (TrainerError, torch.OutOfMemoryError) as error:
        if gate.committed and not backup:
            raise RuntimeError(f"while weights were moved: {error}") from error
        for one, values in zip(optimizers, backup, strict=False):
            overwrite_tensors(one.everything(), values)
        gate.committed = False
        raise
    finally:
        for one in optimizers:
            one.forget()
