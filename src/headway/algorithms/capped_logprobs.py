"""Log-probabilities from logits that a model scales or bounds after its head (Cohere, Granite, Gemma 2).

A scale is part of the temperature. A soft cap c turns a logit z into c · tanh(z / c); such logits are computed for a
chunk of positions at a time and again in the backward pass, in plain torch, so that memory stays bounded as in
`logprobs`. Legend: N positions, C positions of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from headway.algorithms.logprobs import CHUNK_LOGITS, GPU_CHUNK_LOGITS, TokenLogps


class LogitTransform(NamedTuple):
    """What a model does to its logits."""

    scale: float = 1.0
    cap: float = 0.0
    """0: none."""


def read_logit_transform(config: Any) -> LogitTransform:
    """Return what a model of `transformers` with this configuration does to its logits."""
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return LogitTransform(float(scale), float(getattr(config, "final_logit_softcapping", None) or 0.0))


def compute_capped_logps(
    hidden_NH: Tensor,
    head_VH: Tensor,
    token_N: Tensor,
    *,
    bias_V: Tensor | None,
    temperature: float,
    transform: LogitTransform,
) -> TokenLogps:
    """Return what `compute_token_logps` returns, for logits that are capped."""
    wide = torch.promote_types(hidden_NH.dtype, torch.float32)

    def compute(hidden_CH: Tensor, head: Tensor, bias: Tensor | None, token_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = linear(hidden_CH, head, bias).to(wide) * transform.scale
        log_p_CV = (torch.tanh(logits_CV / transform.cap) * (transform.cap / temperature)).log_softmax(-1)
        return log_p_CV.gather(1, token_C[:, None]).squeeze(1), -(log_p_CV.exp() * log_p_CV).sum(1)

    size = max(1, (GPU_CHUNK_LOGITS if hidden_NH.is_cuda else CHUNK_LOGITS) // head_VH.shape[0])
    parts = [
        checkpoint(compute, hidden_NH[first : first + size], head_VH, bias_V, token_N[first : first + size],
                   use_reentrant=False)
        for first in range(0, len(token_N), size)
    ]  # fmt: skip
    if not parts:
        return TokenLogps(logp_N=hidden_NH.new_zeros(0, dtype=wide), entropy_N=hidden_NH.new_zeros(0, dtype=wide))
    return TokenLogps(
        logp_N=torch.cat([logp for logp, _ in parts]), entropy_N=torch.cat([entropy for _, entropy in parts])
    )
