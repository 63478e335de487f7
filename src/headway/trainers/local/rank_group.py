"""Who computes a step together: one process alone, or ranks that each have a share of the packs and of the weights.

A learner asks its team for everything that depends on the others, and so is the same code for one process and for many.
`SINGLE_RANK` is the team of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.policy_model import CriticModel, PolicyModel
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import TokenPack, pack_rows


class RankGroup(Protocol):
    """Everybody makes the same calls in the same order."""

    size: int
    """Devices at work."""

    def policy(self, model: Any, settings: LocalSettings, *, adapters: bool = True) -> PolicyModel:
        """`model`, as everybody holds it."""
        ...

    def critic(self, model: Any, settings: LocalSettings) -> CriticModel: ...

    def optimizer(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> Optimizer: ...

    def packs(self, rows: Sequence[TokenRow], settings: LocalSettings) -> list[TokenPack]:
        """My share of `rows`, as many packs as everybody has; some may be without actions."""
        ...

    def joined(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of all shares: the first added up, of the second the largest."""
        ...

    def out_of_memory(self, failure: str) -> None:
        """Raise where the others could not follow into smaller packs."""
        ...


class _SingleRank:
    size = 1

    def policy(self, model: Any, settings: LocalSettings, *, adapters: bool = True) -> PolicyModel:
        return PolicyModel(model, settings, adapters=adapters)

    def critic(self, model: Any, settings: LocalSettings) -> CriticModel:
        return CriticModel(model, settings)

    def optimizer(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> Optimizer:
        return Optimizer(parameters, settings)

    def packs(self, rows: Sequence[TokenRow], settings: LocalSettings) -> list[TokenPack]:
        return pack_rows(rows, budget=settings.micro_batch_tokens, share=settings.share_prompts, device=settings.device)

    def joined(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        return sums, largest

    def out_of_memory(self, failure: str) -> None:
        """Smaller packs are nobody else's business."""


SINGLE_RANK: RankGroup = _SingleRank()
