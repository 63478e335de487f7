"""GPU kernels for `logprobs`: one pass over a chunk of logits forward, and one backward.

A chunk of a 150k vocabulary is far larger than any cache, so memory traffic decides the time: the forward pass reads a
logit once, the backward pass reads it once and writes its gradient once, rounded to the precision of the matrix
products that follow.

A chunk's probabilities can be kept in half precision, relative to the highest logit seen so far, whose gradient is then
one pass over half the bytes. Sums are in float32. Tokens whose logit is −∞ have probability 0 and no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 8


@triton.jit
def _sums(
    logits, token, scale, logp, entropy, norm, kept, peaks, width, kept_rows, BLOCK: tl.constexpr, KEEP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    blocks = (width + BLOCK - 1) // BLOCK
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
        if KEEP:
            tl.store(kept + row * width + i, e.to(kept.dtype.element_ty), mask=(i < width) & (row < kept_rows))
            tl.store(peaks + row * blocks + start // BLOCK, highest, mask=row < kept_rows)
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


@triton.jit
def _kept_gradient(kept, peaks, token, scale, norm, grad_logp, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    here = i < width
    g = tl.load(grad_logp + row) * scale
    share = tl.exp(tl.load(peaks + row * tl.num_programs(1) + block) - tl.load(norm + row)) * g
    e = tl.load(kept + row * width + i, mask=here, other=0.0).to(tl.float32)
    slope = tl.where(i == tl.load(token + row), g, 0.0) - e * share
    tl.store(kept + row * width + i, slope.to(kept.dtype.element_ty), mask=here)


@dataclass(frozen=True, slots=True, eq=False)
class KeptProbabilities:
    """Probabilities of all tokens in half precision, each relative to the peak of its block when it was written.

    Legend: K kept positions, V vocabulary, B blocks of a row.
    """

    relative_KV: Tensor
    peak_KB: Tensor

    @classmethod
    def allocate(cls, hidden_NH: Tensor, positions: int, vocabulary: int) -> KeptProbabilities:
        """Allocate memory for the first `positions`."""
        blocks = triton.cdiv(vocabulary, _BLOCK)
        return cls(
            hidden_NH.new_empty(positions, vocabulary),
            torch.empty(positions, blocks, dtype=torch.float32, device=hidden_NH.device),
        )

    @property
    def positions(self) -> int:
        """Number of positions."""
        return self.relative_KV.shape[0]

    def select(self, part: slice) -> KeptProbabilities:
        """Return the kept positions inside `part`."""
        return KeptProbabilities(self.relative_KV[part], self.peak_KB[part])

    def compute_gradient(self, token_N: Tensor, scale: float, norm_N: Tensor, grad_logp_N: Tensor) -> Tensor:
        """Return the gradient of the logits before the scale, [K, V]. It replaces the probabilities."""
        rows, width = self.relative_KV.shape
        _kept_gradient[(rows, self.peak_KB.shape[1])](
            self.relative_KV, self.peak_KB, token_N, scale, norm_N, grad_logp_N.contiguous(), width,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        return self.relative_KV


def write_logp_sums(
    logits_CV: Tensor,
    token_C: Tensor,
    scale: float,
    logp_C: Tensor,
    entropy_C: Tensor,
    norm_C: Tensor,
    kept: KeptProbabilities | None = None,
) -> None:
    """Fill `logp_C`, `entropy_C` and `norm_C` with log p of the token, entropy and log-norm of softmax(scale·logits).

    Probabilities of the first positions are written to `kept`.
    """
    rows, width = logits_CV.shape
    keeps = kept is not None and kept.positions > 0
    _sums[(rows,)](
        logits_CV, token_C, scale, logp_C, entropy_C, norm_C,
        kept.relative_KV if kept is not None and keeps else logits_CV,
        kept.peak_KB if kept is not None and keeps else norm_C,
        width, kept.positions if kept is not None else 0, BLOCK=_BLOCK, KEEP=keeps, num_warps=_WARPS,
    )  # fmt: skip


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
