"""Draws one token for each row of logits, with the exact log-probability of the draw.

The log-probability is that of the distribution that is really drawn from: after the temperature and, where top-k,
top-p or min-p cut something off (in this order), after the rest was scaled to 1 again. Without truncation that is the
model's own log-probability at this temperature. With truncation, importance ratios against the behaviour policy stay
right where a plain log-probability would understate the behaviour. Greedy rows (temperature 0) report the
log-probability at temperature 1, because that of a point mass is always 0.

A row's draw depends on its logits and its own uniform number, not on other rows.

Shapes: N rows, V vocabulary, B blocks of the vocabulary, W their width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.types import SamplingParams

_BLOCK_WIDTH = 128


def sample_tokens(
    logits_NV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities. `logits_NV` is float32 and is overwritten."""
    scales = [p.temperature if p.temperature > 0 else 1.0 for p in params]
    if any(scale != 1.0 for scale in scales):
        logits_NV /= torch.tensor(scales, dtype=logits_NV.dtype)[:, None]
    probs_NV = torch.softmax(logits_NV, dim=-1)
    truncated = [
        row for row, p in enumerate(params) if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    ]
    for row in truncated:
        truncate_probabilities(probs_NV[row], params[row])
    tokens_N, mass_N = _pick(probs_NV, torch.tensor(uniforms, dtype=torch.float64))
    greedy = [row for row, p in enumerate(params) if p.temperature <= 0]
    if greedy:
        tokens_N[greedy] = logits_NV[greedy].argmax(dim=-1)
    logps_N = probs_NV.gather(1, tokens_N[:, None])[:, 0].double().log()
    if truncated:
        logps_N[truncated] -= mass_N[truncated].log()
    return tokens_N.tolist(), logps_N.tolist()


def truncate_probabilities(probs_V: Tensor, params: SamplingParams) -> None:
    """Set to 0 the probabilities that are not drawn from. The rest is not scaled."""
    if params.top_k > 0 or params.top_p < 1:
        count = min(params.top_k, len(probs_V)) if params.top_k > 0 else len(probs_V)
        values, order = torch.topk(probs_V, count) if count < len(probs_V) else probs_V.sort(descending=True)
        if params.top_p < 1:
            before = values.double().cumsum(0) - values.double()
            keep = before < params.top_p * values.double().sum()
            keep[0] = True
            values, order = values[keep], order[keep]
        probs_V.zero_()
        probs_V[order] = values
    if params.min_p > 0:
        probs_V.masked_fill_(probs_V < params.min_p * probs_V.max(), 0.0)


def _pick(probs_NV: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token at which the running sum passes `uniform · total`, and the total. Search blocks, then inside."""
    rows, vocabulary = probs_NV.shape
    if vocabulary % _BLOCK_WIDTH:
        probs_NV = torch.nn.functional.pad(probs_NV, (0, -vocabulary % _BLOCK_WIDTH))
    blocks_NBW = probs_NV.view(rows, -1, _BLOCK_WIDTH)
    upto_NB = blocks_NBW.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total_N = upto_NB[:, -1]
    if not bool(torch.isfinite(total_N).all()):
        raise FloatingPointError(f"logits of {int((~torch.isfinite(total_N)).sum())} of {rows} rows are not finite")
    below_N = torch.minimum(uniforms_N * total_N, torch.nextafter(total_N, torch.zeros(())))
    block_N1 = torch.searchsorted(upto_NB, below_N[:, None], right=True)
    start_N = upto_NB.gather(1, block_N1)[:, 0]
    inside_NW = blocks_NBW[torch.arange(rows), block_N1[:, 0]].double().cumsum(dim=-1)
    last_N = inside_NW[:, -1]
    rest_N = (below_N - (start_N - last_N)).clamp(min=0.0)
    rest_N = torch.minimum(rest_N, torch.nextafter(last_N, torch.zeros(())))
    inner_N1 = torch.searchsorted(inside_NW, rest_N[:, None], right=True)
    return block_N1[:, 0] * _BLOCK_WIDTH + inner_N1[:, 0], total_N
