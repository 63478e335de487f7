"""The processes that compute a step together: a single one, or ranks that each hold a share of packs and weights.

A learner asks its rank group for everything that depends on other ranks, so the same code serves one process and many.
`SINGLE_RANK` is the group of one process.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.policy_model import CriticModel, PolicyModel
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import TokenPack, iterate_packs


class RankGroup(Protocol):
    """The ranks as one of them sees them. All ranks make the same calls in the same order."""

    size: int
    """Number of ranks, each with a device."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and publishes weights for all."""

    def make_policy(self, model: Any, settings: LocalSettings, *, adapters: bool = True) -> PolicyModel:
        """Return this rank's part of the policy."""

    def make_critic(self, model: Any, settings: LocalSettings) -> CriticModel:
        """Return this rank's part of the critic."""

    def make_optimizer(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> Optimizer:
        """Return the optimizer of this rank's part of `parameters`."""

    def make_packs(self, rows: Sequence[TokenRow], settings: LocalSettings) -> Iterable[TokenPack]:
        """Return this rank's share of `rows`. All ranks get as many packs; some packs may have no actions."""

    def all_reduce(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Return `sums` added up over all shares, and the largest value of each of `maxima`."""

    def on_out_of_memory(self, failure: str) -> None:
        """Raise `TrainerError` if the other ranks could not switch to smaller packs too."""


class _SingleRank:
    size = 1
    is_first = True

    def make_policy(self, model: Any, settings: LocalSettings, *, adapters: bool = True) -> PolicyModel:
        return PolicyModel(model, settings, adapters=adapters)

    def make_critic(self, model: Any, settings: LocalSettings) -> CriticModel:
        return CriticModel(model, settings)

    def make_optimizer(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> Optimizer:
        return Optimizer(parameters, settings)

    def make_packs(self, rows: Sequence[TokenRow], settings: LocalSettings) -> Iterable[TokenPack]:
        budget, share = settings.micro_batch_tokens, settings.share_prompts
        return iterate_packs(rows, budget=budget, share=share, device=settings.device)

    def all_reduce(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        return sums, maxima

    def on_out_of_memory(self, failure: str) -> None:
        """Do nothing: a single process can always use smaller packs."""


SINGLE_RANK: RankGroup = _SingleRank()
