"""GPU kernels for `logprobs`: one pass over a chunk of logits forward, and one backward.

A chunk of a 150k vocabulary is far larger than any cache, so memory traffic decides the time: the forward pass reads a
logit once, the backward pass reads it once and writes its gradient once, rounded to the precision of the matrix
products that follow.

Sums are in float32. Tokens whose logit is −∞ have probability 0 and no gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 8


@triton.jit
def _sums(logits, token, scale, logp, entropy, norm, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * width + i, mask=i < width, other=-float("inf")).to(tl.float32) * scale
        highest = tl.maximum(peak, tl.max(x, 0))
        shrink = tl.exp(peak - highest)
        e = tl.exp(x - highest)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(e > 0, e * x, 0.0), 0)
        peak = highest
    found = peak + tl.log(total)
    chosen = tl.load(logits + row * width + tl.load(token + row)).to(tl.float32) * scale
    tl.store(norm + row, found)
    tl.store(logp + row, chosen - found)
    tl.store(entropy + row, found - weighted / total)


@triton.jit
def _gradient(
    logits, token, scale, norm, entropy, grad_logp, grad_entropy, out, width,
    BY_LOGP: tl.constexpr,
    BY_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < width
    x = tl.load(logits + row * width + i, mask=here, other=-float("inf")).to(tl.float32) * scale
    log_p = x - tl.load(norm + row)
    p = tl.exp(log_p)
    slope = tl.zeros([BLOCK], tl.float32)
    if BY_ENTROPY:
        inner = tl.where(p > 0, log_p + tl.load(entropy + row), 0.0)
        slope -= p * inner * tl.load(grad_entropy + row)
    if BY_LOGP:
        g = tl.load(grad_logp + row)
        slope += tl.where(i == tl.load(token + row), g, 0.0) - p * g
    tl.store(out + row * width + i, (slope * scale).to(out.dtype.element_ty), mask=here)


def write_logp_sums(
    logits_CV: Tensor, token_C: Tensor, scale: float, logp_C: Tensor, entropy_C: Tensor, norm_C: Tensor
) -> None:
    """Fill the last three arguments with log p of the token, entropy and log-norm of softmax(scale·logits)."""
    rows, width = logits_CV.shape
    _sums[(rows,)](logits_CV, token_C, scale, logp_C, entropy_C, norm_C, width, BLOCK=_BLOCK, num_warps=_WARPS)


def compute_logit_gradient(
    logits_CV: Tensor,
    token_C: Tensor,
    scale: float,
    norm_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    dtype: torch.dtype,
    *,
    recomputed: bool = True,
) -> Tensor:
    """Return the gradient of the logits before the scale, [C, V] in `dtype`. `recomputed` makes no difference here."""
    rows, width = logits_CV.shape
    out_CV = torch.empty(rows, width, dtype=dtype, device=logits_CV.device)
    _gradient[(rows, triton.cdiv(width, _BLOCK))](
        logits_CV, token_C, scale, norm_C, entropy_C,
        norm_C if grad_logp_C is None else grad_logp_C.contiguous(),
        norm_C if grad_entropy_C is None else grad_entropy_C.contiguous(),
        out_CV, width,
        BY_LOGP=grad_logp_C is not None,
        BY_ENTROPY=grad_entropy_C is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip
    return out_CV
