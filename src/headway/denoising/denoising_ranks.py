"""The processes that train a denoising model together: a single one, or ranks with a share of the samples each.

A learner asks its ranks for everything that depends on the others, so the same code serves one process and many.
`SINGLE_DENOISING_RANK` is one process.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from headway.algorithms.diffusion_nft import old_policy_decay, update_old_policy
from headway.denoising.denoising_batch import SampleSteps
from headway.denoising.denoising_policy import DenoisingPolicy
from headway.denoising.settings import DenoisingTrainerSettings
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.settings import OptimizerSettings


class MicroBatch(NamedTuple):
    """Whole samples that go through the model together."""

    rows: Sequence[SampleSteps]
    weight: float = 1.0
    """1; or 0 for a micro-batch that only keeps a rank in step with the others."""


class DenoisingRanks(Protocol):
    """The ranks as one of them sees them. All ranks make the same calls in the same order."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and publishes weights for all."""

    def make_policy(self, model: Any, settings: DenoisingTrainerSettings, copies: int) -> DenoisingPolicy:
        """Return this rank's part of the policy, which can be frozen `copies` times."""

    def make_optimizer(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, old: Mapping[str, Tensor] | None
    ) -> Optimizer:
        """Return the optimizer of this rank's part of `parameters`; the tensors `old` follow them slowly."""

    def split(self, rows: Sequence[SampleSteps], size: int) -> Iterator[MicroBatch]:
        """Iterate over this rank's share of `rows`, `size` at a time. All ranks get as many micro-batches."""

    def all_reduce(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Return `sums` added up over all ranks, and the largest value of each of `maxima`."""

    def on_out_of_memory(self, failure: str) -> None:
        """Raise `TrainerError` if the other ranks could not switch to smaller micro-batches too."""


class OldPolicyFollower:
    """Mixed into an optimizer: keeps the old policy, which follows slowly; checkpoints hold it too."""

    old: Mapping[str, Tensor]
    """Values of the old policy, by the names of the trained parameters."""
    _parameters: dict[str, nn.Parameter]

    def step(self, version: int) -> float:
        rate: float = super().step(version)  # type: ignore[misc]
        update_old_policy(self.old.values(), [self._parameters[name] for name in self.old], old_policy_decay(version))
        return rate

    def state_tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = super().state_tensors()  # type: ignore[misc]
        return {**found, **{f"{name}/old": one for name, one in self.old.items()}}


class OldPolicyOptimizer(OldPolicyFollower, Optimizer):
    """The optimizer of DiffusionNFT in one process."""


class _SingleDenoisingRank:
    is_first = True

    def make_policy(self, model: Any, settings: DenoisingTrainerSettings, copies: int) -> DenoisingPolicy:
        return DenoisingPolicy(model, settings.local, settings.denoising)

    def make_optimizer(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, old: Mapping[str, Tensor] | None
    ) -> Optimizer:
        if old is None:
            return Optimizer(parameters, settings)
        optimizer = OldPolicyOptimizer(parameters, settings)
        optimizer.old = old
        return optimizer

    def split(self, rows: Sequence[SampleSteps], size: int) -> Iterator[MicroBatch]:
        return split_micro_batches(rows, size)

    def all_reduce(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        return sums, maxima

    def on_out_of_memory(self, failure: str) -> None:
        """Do nothing: a single process can always use smaller micro-batches."""


SINGLE_DENOISING_RANK: DenoisingRanks = _SingleDenoisingRank()


def split_micro_batches(rows: Sequence[SampleSteps], size: int) -> Iterator[MicroBatch]:
    """Iterate over whole samples, `size` at a time."""
    for start in range(0, len(rows), size):
        yield MicroBatch(rows[start : start + size])
