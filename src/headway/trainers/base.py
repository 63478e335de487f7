"""The protocols of trainers and scorers, as the flow uses them.

A step is all or nothing: `train` either returns with `version` one higher, or raises `TrainerError` with `version`
unchanged, or the trainer is lost (`TrainerCrashed`). A lost trainer comes back by `restart` and `load`, with the
version of its last checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from headway.errors import ScoringError, TrainerError
from headway.types import Batch, SampleGroup
from headway.weights.base import WeightSource

ScoreKind = Literal["policy", "reference", "value"]
"""Log-probabilities under the current weights, log-probabilities under the initial ones, or values of the critic."""


class Trainer(Protocol):
    """Holds the policy that is trained."""

    @property
    def version(self) -> int:
        """Number of training steps done."""

    @property
    def source(self) -> WeightSource:
        """The source that weight updates gather from."""

    async def train(self, batch: Batch) -> Mapping[str, float]:
        """Train one step on `batch` and return metrics. Afterwards `version == batch.trained + 1`."""

    async def save(self, directory: Path) -> None:
        """Write everything needed to continue from `version` into the empty `directory`."""

    async def load(self, directory: Path) -> Sequence[str]:
        """Restore the state that `save` wrote, and return what is worth a line about it.

        Raise `TrainerError` and change nothing if it is damaged: the flow then goes back to the one before.
        """

    async def start(self) -> None:
        """Bring the trainer up before its first step; a no-op for one that lives in this process.

        Raise `ConfigError` if it cannot run as configured and `TrainerCrashed` if it does not come up; `restart` then
        tries once more.
        """

    async def restart(self) -> None:
        """Bring a crashed trainer back in its initial state; `load` follows."""

    async def close(self) -> None:
        """Release everything. Idempotent."""


class Scorer(Protocol):
    """Computes one number per action for each sample of a group."""

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Return the numbers in the order of `group.samples`, as `VersionedScores` if the weights change over time.

        Raise `ScoringError` if they cannot be computed, `TrainerCrashed` if the trainer that computes them is lost.
        """

    async def start(self) -> None:
        """Bring the scorer up before its first group; a no-op for one that shares the trainer's process.

        Raise `ConfigError` if it cannot run as configured, else `ScoringError`.
        """

    async def close(self) -> None:
        """Release everything that the scorer owns. Idempotent."""


@runtime_checkable
class ScoringTrainer(Protocol):
    """A trainer that can also score with its policy, its reference or its critic."""

    async def score(self, kind: ScoreKind, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Score a group between two steps."""


@runtime_checkable
class ReturnsTrainer(Protocol):
    """A trainer whose critic is another process."""

    async def compute_returns(self, batch: Batch) -> tuple[Sequence[float], Sequence[bool]]:
        """Return the returns of all actions of a batch, and which of them count; `train` with the batch follows."""


@runtime_checkable
class OffloadReporter(Protocol):
    """A trainer that can say when an optimizer step moves its state between host and device."""

    def report_offload_to(self, report: Callable[[bool], object]) -> None:
        """Call `report`, on whatever thread, with true when such a step begins and with false when it ends."""


class TrainerScorer:
    """A `Scorer` that uses the models of a trainer and takes turns with its steps."""

    def __init__(self, trainer: ScoringTrainer, kind: ScoreKind) -> None:
        self._trainer = trainer
        self._kind = kind

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        try:
            return await self._trainer.score(self._kind, group)
        except TrainerError as error:
            raise ScoringError(f"group {group.group_id}: {error}") from error

    async def start(self) -> None:
        """Do nothing: the trainer does the scoring."""

    async def close(self) -> None:
        """Do nothing: the trainer owns the models."""
