"""What a flow trainer needs to know, what it says about an update, and what a way of learning has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from headway.algorithms import Advantages, PolicySums
from headway.algorithms.flow import NftParams
from headway.generative.batch import Drawn, FlowBatch
from headway.generative.settings import FlowSettings
from headway.trainers.local.optimizer import Optimizer
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.worker import Gate


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTraining:
    """One flow trainer."""

    local: LocalSettings
    """Optimizer, objective, advantages, epochs, precision, place: as for language."""
    flow: FlowSettings
    micro_batch_samples: int = 8
    """Samples of one forward pass, all their trained steps together."""
    kl_coef: float | None = None
    """Of the KL to the policy of the start; None: there is none. The objective's own stays off."""
    kl_mode: Literal["exact", "compatible"] = "exact"
    """The KL of two Gaussians, or what published Flow-SDE code computes, which is |dt| times that."""
    nft: NftParams | None = None
    """DiffusionNFT instead of a policy loss."""
    nft_levels: int = 2
    """Noise levels that it looks at each picture from."""
    seed: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Report:
    """What there is to say about an update, gathered while it runs."""

    sums: PolicySums | None = None
    loss: float = 0.0
    kl_loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    steps: int = 0
    micro_batches: int = 0
    calls: int = 0
    skipped: set[int] = field(default_factory=set)

    def metrics(self, batch: FlowBatch) -> dict[str, float]:
        """By the names they are logged under."""
        found = {} if self.sums is None else self.sums.summary()
        each = max(self.steps, 1)
        return {
            **found,
            "loss": self.loss / each,
            "pg_loss": (self.loss - self.kl_loss) / each,
            "kl_loss": self.kl_loss / each,
            "grad_norm": self.grad_norm / each,
            "learning_rate": self.learning_rate,
            "optimizer_steps": float(self.steps),
            "micro_batches": float(self.micro_batches),
            "denoiser_rows": float(self.calls),
            "samples": float(len(batch.rows)),
            "skipped_samples": float(len(self.skipped)),
            "lag_mean": float(batch.lag_N.mean()),
            "lag_max": float(batch.lag_N.max()),
            "reward": 0.0 if batch.reward_S is None else float(batch.reward_S.mean()),
        }


class Lesson(Protocol):
    """How a batch teaches."""

    ends_only: bool
    """Where steps began does not matter."""
    at_once: int
    """Samples of one forward pass."""

    @property
    def optimizer(self) -> Optimizer:
        """What moves the weights."""
        ...

    def completed(self, batch: FlowBatch, gate: Gate) -> FlowBatch:
        """With what the lesson reads and no stage has filled, under the weights of now."""
        ...

    def gradients(
        self, batch: FlowBatch, made: Advantages, rows: Sequence[Drawn], version: int, report: Report, gate: Gate
    ) -> None:
        """Add up the gradients of one mini-batch."""
        ...
