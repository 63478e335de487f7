"""Small makers for the tests of the algorithms: a policy of one table, batches of packed actions, all in float64."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from headway.algorithm_traits import LOSS_TRAITS
from headway.algorithms.actions import Actions, BatchTotals
from headway.algorithms.losses import LossSettings
from headway.algorithms.objective import PolicyObjective
from headway.registry import POLICY_LOSSES

LOSS_NAMES = POLICY_LOSSES.built_in
INDEPENDENT_LOSSES = tuple(name for name in LOSS_NAMES if not LOSS_TRAITS.get(name).compares_actions)
"""Losses of an action that the other actions of a micro-batch do not change."""
MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def reals(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def whole(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def bits(text: str) -> Tensor:
    """`1101` → a mask."""
    return torch.tensor([letter == "1" for letter in text])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A softmax table as the policy, and a batch of actions that an older table made."""

    table: Tensor
    """[context, token] logits being trained."""
    context_N: Tensor
    token_N: Tensor
    fixed: dict[str, Any]
    """Fields of `Actions` that do not depend on the table."""

    def actions(self, table: Tensor, **changes: Any) -> Actions:
        """The whole batch under `table`, differentiable in it."""
        log_p_NV = table[self.context_N].log_softmax(-1)
        logp_N = log_p_NV.gather(1, self.token_N[:, None]).squeeze(1)
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
        return Actions(**{"logp_N": logp_N, "entropy_N": entropy_N, **self.fixed, **changes})

    def totals(self) -> BatchTotals:
        return BatchTotals.of(self.fixed["mask_N"], self.fixed["sequence_N"], self.fixed["sequences"])


def world(seed: int, *, sequences: int = 7, longest: int = 6, drift: float = 0.7) -> World:
    """Sequences of unequal length, some actions masked, rewards 0 or 1, the policy `drift` ahead of the behaviour."""
    random = generator(seed)
    lengths = torch.randint(1, longest + 1, (sequences,), generator=random)
    sequence_N = torch.arange(sequences).repeat_interleave(lengths)
    count = int(lengths.sum())
    context_N = torch.randint(0, 4, (count,), generator=random)
    token_N = torch.randint(0, 5, (count,), generator=random)
    table = torch.randn(4, 5, generator=random, dtype=torch.float64)

    def shaken(scale: float) -> Tensor:
        moved = table + scale * torch.randn(4, 5, generator=random, dtype=torch.float64)
        return moved[context_N].log_softmax(-1).gather(1, token_N[:, None]).squeeze(1)

    reward_S = torch.arange(sequences, dtype=torch.float64) % 2
    return World(
        table=table,
        context_N=context_N,
        token_N=token_N,
        fixed={
            "behaviour_N": shaken(drift),
            "proximal_N": shaken(drift / 2),
            "reference_N": shaken(drift),
            "advantage_N": (reward_S - 0.5)[sequence_N] * (1 + torch.rand(count, generator=random).double()),
            "reward_N": reward_S[sequence_N],
            "mask_N": torch.rand(count, generator=random) < 0.8,
            "sequence_N": sequence_N,
            "sequences": sequences,
        },
    )


def select(actions: Actions, index: Tensor) -> Actions:
    """Return the actions at `index` as a micro-batch of these."""
    tensors = {one.name: getattr(actions, one.name) for one in fields(actions)}
    picked: dict[str, Any] = {name: value[index] for name, value in tensors.items() if isinstance(value, Tensor)}
    return replace(actions, **picked)


def gradient(objective: PolicyObjective, place: World, **changes: Any) -> Tensor:
    """Of the loss of the whole batch at once, with respect to the table."""
    table = place.table.clone().requires_grad_()
    objective(place.actions(table, **changes), place.totals()).loss.backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return table.grad


def objective(name: str, **options: Any) -> PolicyObjective:
    """Return the objective of `name` with the settings that a configuration gives it by default."""
    low, high = LOSS_TRAITS.get(name).default_clip or (0.2, 0.2)
    return PolicyObjective(pg_variant=name, settings=LossSettings(clip_low=low, clip_high=high), **options)
