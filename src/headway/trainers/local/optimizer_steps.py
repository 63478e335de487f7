"""The base of all learners, and the optimizer steps of one batch: all of them happen, or none.

A learner is what the thread of a trainer runs: models, optimizers, updates and scores. It knows no event loop.

Guarantees: an error before weights are changed is a `TrainerError`. An error while they are changed sets `broken`, and
the owner must discard the learner. Nothing is changed before `CommitGate.commit`, and after it only by optimizer
steps. Where a batch makes several steps, a copy on the host from before the first is restored if a later one fails.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from headway.algorithms.kl import KlController
from headway.algorithms.objective import PolicyMetricSums
from headway.errors import ScoringError, TrainerError
from headway.trainers.base import ScoreKind
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import ScoredBatch
from headway.trainers.local.training_thread import CommitGate, JobAbandoned
from headway.types import Batch, SampleGroup
from headway.user_code import locate_user_code

T = TypeVar("T")
R = TypeVar("R")


class StepLearner(ABC):
    """Trains a policy, one version per batch."""

    def __init__(self, settings: LocalSettings, kl: KlController | None) -> None:
        self.settings = settings
        self.kl = kl or KlController(0.0)
        self.version = 0
        self.broken = False

    @property
    @abstractmethod
    def optimizers(self) -> list[Optimizer]:
        """The optimizer of the policy, then that of the critic if there is one."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return all weights of the policy by the names of the model, each tensor once and LoRA merged."""

    def published_weights(self) -> dict[str, Tensor]:
        """Return what engines get as a version: all weights, unless they have some of them for good."""
        return self.weights()

    @abstractmethod
    def save_model_config(self, directory: Path) -> None:
        """Write what is needed beside the weights to load the model again."""

    @property
    def has_half_weights(self) -> bool:
        """Whether weights are held in half precision, beside masters of the optimizer."""
        return self.settings.precision == "bf16"

    def learn(self, batch: Batch, gate: CommitGate) -> dict[str, float]:
        """Train on `batch` and return metrics; `version` is one higher afterwards."""
        if batch.trained != self.version:
            raise TrainerError(f"a batch for version {batch.trained}, the trainer is at {self.version}")
        try:
            return self._learn(batch, gate)
        except (TrainerError, JobAbandoned):
            raise
        except Exception as error:
            self.broken = gate.committed
            place = locate_user_code(error)
            raise TrainerError(f"step {batch.trained + 1}: {type(error).__name__}: {error}{place}") from error

    def score(self, kind: ScoreKind, group: SampleGroup, gate: CommitGate) -> list[list[float]]:
        """Return one number per action of each sample. Raise `ScoringError` if they cannot be computed."""
        try:
            return self._score(kind, group, gate)
        except JobAbandoned:
            raise
        except Exception as error:
            raise ScoringError(f"group {group.group_id}: {error}") from error

    @abstractmethod
    def _learn(self, batch: Batch, gate: CommitGate) -> dict[str, float]: ...

    @abstractmethod
    def _score(self, kind: ScoreKind, group: SampleGroup, gate: CommitGate) -> list[list[float]]: ...


@dataclass(slots=True, kw_only=True, eq=False)
class OptimizerStepReport:
    """Metrics of an update, collected while it runs. `apply_optimizer_steps` fills in the first three."""

    steps: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    micro_batches: int = 0
    offload_s: float = 0.0
    """Seconds in which moments were moved between host and device."""
    sums: PolicyMetricSums | None = None
    skipped: set[int] = field(default_factory=set)
    """Samples that were left out because they had no gradient, by their first action."""

    def common_metrics(self, batch: ScoredBatch, samples: int) -> dict[str, float]:
        """Return the metrics of any model by the names they are logged under."""
        return {
            **({} if self.sums is None else self.sums.summary()),
            "grad_norm": self.grad_norm / max(self.steps, 1),
            "learning_rate": self.learning_rate,
            "optimizer_steps": float(self.steps),
            "micro_batches": float(self.micro_batches),
            **({"offload_s": self.offload_s} if self.offload_s else {}),
            "samples": float(samples),
            "skipped_samples": float(len(self.skipped)),
            "lag_mean": float(batch.lag_N.mean()),
            "lag_max": float(batch.lag_N.max()),
            "reward": 0.0 if batch.reward_S is None else float(batch.reward_S.mean()),
        }


def retry_on_oom(work: Callable[[], T], reduce_memory: Callable[[str], None], device: str) -> T:
    """Return the result of `work`, called again after each failure for lack of memory.

    `reduce_memory` gets the error message and makes `work` need less memory, or raises.
    """
    while True:
        try:
            return work()
        except torch.OutOfMemoryError as error:
            failure = str(error).partition("\n")[0]
        reduce_memory(failure)  # outside of the handler, because the error keeps the tensors to be freed alive
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()


def iterate_mini_batches(rows: Sequence[R], settings: LocalSettings) -> Iterator[Sequence[R]]:
    """Yield the rows of each optimizer step, epoch after epoch."""
    size = settings.mini_batch_samples or len(rows)
    for _ in range(settings.epochs):
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def apply_optimizer_steps(
    optimizers: Sequence[Optimizer],
    mini_batches: Sequence[Sequence[R]],
    compute_gradients: Callable[[Sequence[R]], None],
    report: OptimizerStepReport,
    version: int,
    gate: CommitGate,
) -> None:
    """Do all optimizer steps of one batch, or none. `compute_gradients` accumulates those of one mini-batch."""
    backups = [one.begin_backup() for one in optimizers] if len(mini_batches) > 1 else []
    try:
        for rows in mini_batches:
            compute_gradients(rows)
            norms = [one.clip_gradients(f"step {version + 1}") for one in optimizers]
            if not report.steps:
                for copy in backups:
                    copy.finish()
            gate.commit()
            rates = [one.step(version) for one in optimizers]
            report.offload_s += sum(one.offload_s for one in optimizers)
            for one in optimizers:
                one.clear_gradients()
            report.steps += 1
            report.grad_norm += norms[0]
            report.learning_rate = rates[0]
    except (TrainerError, torch.OutOfMemoryError) as error:
        if gate.committed and not backups:
            raise RuntimeError(f"while weights were moved: {error}") from error
        if gate.committed:
            for one in optimizers:
                one.restore_backup()
        gate.committed = False
        raise
    finally:
        for one in optimizers:
            one.clear_gradients()
