"""Attention with what some families add to its scores, in plain torch: soft caps (Gemma 2) and sinks (gpt-oss).

A soft cap c turns a score s into c · tanh(s / c). A sink is one more score for each head, which takes a part of the
weight and adds nothing to the result. Both are computed in float32.

Shapes: B batch, H heads, K key-value heads, Q queries, L keys, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ScoreExtras(NamedTuple):
    """What is done to the scores of one layer."""

    softcap: float = 0.0
    """0: none."""
    sinks: Tensor | None = None
    """One score for each head, (H)."""

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return self.softcap > 0 or self.sinks is not None


NO_EXTRAS = ScoreExtras()


def attend_with_extras(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    extras: ScoreExtras,
) -> Tensor:
    """Return what `scaled_dot_product_attention` with grouped heads returns, with extras: (B, H, Q, D)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if extras.softcap > 0:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    if extras.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = extras.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
