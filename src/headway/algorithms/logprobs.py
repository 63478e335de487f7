"""Log-probabilities and entropies of chosen tokens from hidden states, without ever holding all logits.

Logits are computed for a chunk of positions at a time, reduced to two numbers per position, and computed again in the
backward pass. Between the passes only the hidden states (which the model keeps anyway) and two numbers per position are
kept. Peak extra memory is about three chunks of logits, whatever the number of positions; the price is one more matrix
product. Where all positions fit into one chunk, that chunk is kept instead and nothing is computed twice. On a GPU
chunks are larger and each logit is read once instead of ten times (`triton_logprobs`). There the caller may have a
share of memory used for probabilities in half precision, and positions that fit into it are not computed twice.

Guarantees: equal to log_softmax(hidden·headᵀ / temperature) and its gradients up to rounding; reductions in at least
float32. Not differentiable twice. The caller chooses the positions.

Legend: N positions, C positions of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 2**24
"""Logits of a chunk where no size is given: 64 MB in float32."""
GPU_CHUNK_LOGITS = 2**28
"""Logits of a chunk on a GPU, where large matrix products are faster: 1 GB."""
KEPT_SHARE = 16
"""The share of a GPU's memory for kept probabilities is one divided by this."""

_IMPOSSIBLE = -1e4
"""A log-probability whose exponential is 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogps:
    """Log-probability and entropy of each chosen token; both carry gradients."""

    logp_N: Tensor
    entropy_N: Tensor


def compute_token_logps(
    hidden_NH: Tensor,
    head_VH: Tensor,
    token_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    keep: bool = False,
) -> TokenLogps:
    """Return log p(token | hidden) after the temperature, and the entropy of p.

    `temperature` is the one the engine sampled with, because its log-probabilities are after it too. `chunk` is the
    number of positions whose logits exist at once. `keep` spends memory of a GPU on keeping probabilities for the
    backward pass, unless the entropy is differentiated.
    """
    size = chunk or max(1, (GPU_CHUNK_LOGITS if hidden_NH.is_cuda else CHUNK_LOGITS) // head_VH.shape[0])
    kept = _count_kept(hidden_NH, head_VH) if keep and torch.is_grad_enabled() else 0
    logp_N, entropy_N = _Chunked.apply(hidden_NH, head_VH, bias_V, token_N, 1 / temperature, size, kept)  # type: ignore[no-untyped-call]
    return TokenLogps(logp_N=logp_N, entropy_N=entropy_N)


def _count_kept(hidden_NH: Tensor, head_VH: Tensor) -> int:
    """Return the number of positions whose probabilities are kept."""
    if not _has_kernels(hidden_NH) or hidden_NH.dtype not in (torch.bfloat16, torch.float16):
        return 0
    memory: int = torch.cuda.get_device_properties(hidden_NH.device).total_memory
    return min(hidden_NH.shape[0], memory // KEPT_SHARE // (head_VH.shape[0] * hidden_NH.element_size()))


def _chunks(start: int, positions: int, size: int) -> Iterator[slice]:
    for first in range(start, positions, size):
        yield slice(first, min(first + size, positions))


def _logits(hidden_CH: Tensor, head_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return logits, [C, V], in at least float32."""
    if hidden_CH.is_cuda and hidden_CH.dtype in (torch.bfloat16, torch.float16):
        logits_CV = torch.mm(hidden_CH, head_VH.t(), out_dtype=torch.float32)
        return logits_CV if bias_V is None else logits_CV.add_(bias_V)
    logits_CV = torch.nn.functional.linear(hidden_CH, head_VH, bias_V)
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))


def _has_kernels(hidden_NH: Tensor) -> bool:
    return hidden_NH.is_cuda and hidden_NH.dtype != torch.float64 and find_spec("triton") is not None


def _select_kernels(hidden_NH: Tensor) -> tuple[Any, Any]:
    """Return the functions that process a chunk forward and backward."""
    if not _has_kernels(hidden_NH):
        return _write_logp_sums, _compute_logit_gradient
    from headway.algorithms import triton_logprobs

    return triton_logprobs.write_logp_sums, triton_logprobs.compute_logit_gradient


class _Chunked(torch.autograd.Function):
    """Computes the forward pass in chunks; the backward pass computes the logits of chunks that are not kept again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        token_N: Tensor,
        inverse_temperature: float,
        size: int,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_N, entropy_N, norm_N = (hidden_NH.new_empty(token_N.shape, dtype=wide) for _ in range(3))
        write_sums, ctx.gradient = _select_kernels(hidden_NH)
        ctx.kept = _make_kept(hidden_NH, kept, head_VH.shape[0]) if any(ctx.needs_input_grad) else None
        for part in _chunks(0, token_N.shape[0], size):
            logits_CV = _logits(hidden_NH[part], head_VH, bias_V)
            options = {} if ctx.kept is None else {"kept": ctx.kept.select(part)}
            write_sums(
                logits_CV, token_N[part], inverse_temperature, logp_N[part], entropy_N[part], norm_N[part], **options
            )
        single = 0 < token_N.shape[0] <= size and any(ctx.needs_input_grad) and ctx.kept is None
        ctx.save_for_backward(hidden_NH, head_VH, bias_V, token_N, norm_N, entropy_N, logits_CV if single else None)
        ctx.inverse_temperature, ctx.size = inverse_temperature, size
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logp_N is None and grad_entropy_N is None:
            return (None,) * 7
        hidden_NH, head_VH, bias_V, token_N, norm_N, entropy_N, single_CV = ctx.saved_tensors
        kept = ctx.kept if grad_entropy_N is None else None
        sums = _GradientSums(hidden_NH, head_VH, bias_V, ctx.needs_input_grad[:3])
        first = 0
        if kept is not None and grad_logp_N is not None:
            first = kept.positions
            narrow_CV = kept.compute_gradient(token_N, ctx.inverse_temperature, norm_N, grad_logp_N)
            sums.add(slice(0, first), narrow_CV, is_all=first == token_N.shape[0])
        for part in _chunks(first, token_N.shape[0], ctx.size):
            recomputed = single_CV is None
            narrow_CV = ctx.gradient(
                _logits(hidden_NH[part], head_VH, bias_V) if recomputed else single_CV,
                token_N[part],
                ctx.inverse_temperature,
                norm_N[part],
                entropy_N[part],
                None if grad_logp_N is None else grad_logp_N[part],
                None if grad_entropy_N is None else grad_entropy_N[part],
                hidden_NH.dtype,
                recomputed=recomputed,
            )
            sums.add(part, narrow_CV, is_all=False)
        ctx.kept = None
        return *sums.finish(), None, None, None, None


def _make_kept(hidden_NH: Tensor, positions: int, vocabulary: int) -> Any:
    if not positions:
        return None
    from headway.algorithms.triton_logprobs import KeptProbabilities

    return KeptProbabilities.allocate(hidden_NH, positions, vocabulary)


class _GradientSums:
    """Gradients of hidden states, head and bias, added up from gradients of logits."""

    def __init__(self, hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, needs: tuple[bool, ...]) -> None:
        self._hidden_NH, self._head_VH, self._bias_V = hidden_NH, head_VH, bias_V
        self._wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        needs_hidden, self._needs_head, needs_bias = needs
        self._grad_hidden_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        self._grad_head_VH: Tensor | None = None
        self._grad_bias_V = head_VH.new_zeros(head_VH.shape[0], dtype=self._wide) if needs_bias else None

    def add(self, part: slice, grad_CV: Tensor, *, is_all: bool) -> None:
        """Add what the positions `part` contribute; `is_all` says that there are no others."""
        if self._grad_bias_V is not None:
            self._grad_bias_V += grad_CV.sum(0, dtype=self._grad_bias_V.dtype)
        if self._grad_hidden_NH is not None:
            torch.mm(grad_CV, self._head_VH, out=self._grad_hidden_NH[part])
        if not self._needs_head:
            return
        if is_all:
            self._grad_head_VH = grad_CV.T @ self._hidden_NH[part]
            return
        if self._grad_head_VH is None:
            self._grad_head_VH = torch.zeros_like(self._head_VH, dtype=self._wide)
        _accumulate(self._grad_head_VH, grad_CV, self._hidden_NH[part])

    def finish(self) -> tuple[Tensor | None, ...]:
        head = None if self._grad_head_VH is None else self._grad_head_VH.to(self._head_VH.dtype)
        bias = None if self._grad_bias_V is None or self._bias_V is None else self._grad_bias_V.to(self._bias_V.dtype)
        if head is None and self._needs_head:
            head = torch.zeros_like(self._head_VH)
        return self._grad_hidden_NH, head, bias


def _write_logp_sums(
    logits_CV: Tensor, token_C: Tensor, scale: float, logp_C: Tensor, entropy_C: Tensor, norm_C: Tensor
) -> None:
    """Fill the last three arguments from a chunk; log-probabilities of all tokens replace the logits."""
    if scale != 1:
        logits_CV.mul_(scale)
    chosen_C = logits_CV.gather(1, token_C[:, None]).squeeze(1)
    norm_C.copy_(logits_CV.logsumexp(1))
    logp_C.copy_(chosen_C - norm_C)
    log_p_CV = _log_p(logits_CV, norm_C)
    entropy_C.copy_(-log_p_CV.exp().mul_(log_p_CV).sum(1))


def _compute_logit_gradient(
    logits_CV: Tensor,
    token_C: Tensor,
    scale: float,
    norm_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    dtype: torch.dtype,
    *,
    recomputed: bool,
) -> Tensor:
    """Return the gradient of the logits, either `recomputed` or what `_write_logp_sums` left in their place."""
    log_p_CV = _log_p(logits_CV if scale == 1 else logits_CV.mul_(scale), norm_C) if recomputed else logits_CV
    return _logit_gradient(log_p_CV, token_C, entropy_C, grad_logp_C, grad_entropy_C).mul_(scale).to(dtype)


def _log_p(logits_CV: Tensor, norm_C: Tensor) -> Tensor:
    """Overwrite `logits_CV` with log-probabilities. Forbidden tokens become finite, so that p·log p is 0, not NaN."""
    return logits_CV.sub_(norm_C[:, None]).clamp_(min=_IMPOSSIBLE)


def _logit_gradient(
    log_p_CV: Tensor, token_C: Tensor, entropy_C: Tensor, grad_logp_C: Tensor | None, grad_entropy_C: Tensor | None
) -> Tensor:
    """Return g·(onehot − p) − h·p·(log p + H)."""
    grad_CV = log_p_CV.exp()
    if grad_entropy_C is not None:
        slope_CV = (log_p_CV + entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
        grad_CV.mul_(slope_CV if grad_logp_C is None else slope_CV.sub_(grad_logp_C[:, None]))
    elif grad_logp_C is not None:
        grad_CV.mul_(-grad_logp_C[:, None])
    return grad_CV if grad_logp_C is None else grad_CV.scatter_add_(1, token_C[:, None], grad_logp_C[:, None])


def _accumulate(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    """Add gradᵀ·hidden to `total_VH`, in place where the precision is the same."""
    if total_VH.dtype == grad_CV.dtype:
        total_VH.addmm_(grad_CV.T, hidden_CH)
    else:
        total_VH += grad_CV.T @ hidden_CH
