"""Differentiable parts of a decoder layer, each with a backward pass written by hand.

On a GPU in half precision they are one kernel in each direction (`triton_layers`); elsewhere they are plain torch.
What kernels keep for the backward pass is what the matrix products keep anyway.

Legend: T tokens, E width of a row, H heads, D size of a head, K keys of all spans.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm, silu


@cache
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the functions of this module are kernels for tensors of this kind."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and find_spec("triton") is not None


def add_norm(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its root-mean-square norm times the weight."""
    if has_kernels(x_TE.device, x_TE.dtype):
        found: tuple[Tensor, Tensor] = _AddNorm.apply(x_TE, delta_TE, weight_E, eps)  # type: ignore[no-untyped-call]
        return found
    total_TE = x_TE if delta_TE is None else x_TE + delta_TE
    return total_TE, rms_norm(total_TE, weight_E.shape, weight_E, eps)


def rotate(q_THD: Tensor, k_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, rotated by the angles of their positions."""
    if has_kernels(q_THD.device, q_THD.dtype):
        found: tuple[Tensor, Tensor] = _Rotate.apply(q_THD, k_THD, cos_TD, sin_TD)  # type: ignore[no-untyped-call]
        return found
    cos_THD, sin_THD = cos_TD[:, None], sin_TD[:, None]
    q, k = (x * cos_THD + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin_THD for x in (q_THD, k_THD))
    return q, k


def gate(gate_TE: Tensor, up_TE: Tensor) -> Tensor:
    """Return silu(gate)·up."""
    if has_kernels(gate_TE.device, gate_TE.dtype):
        found: Tensor = _Gate.apply(gate_TE, up_TE)  # type: ignore[no-untyped-call]
        return found
    return silu(gate_TE) * up_TE


def select_rows(x_TE: Tensor, index_K: Tensor, starts_T: Tensor, uses_K: Tensor) -> Tensor:
    """Return the rows `index_K` of x; gradients of a row are summed in float32 and always in the same order.

    Token t is used at the places `uses_K[starts_T[t]:starts_T[t + 1]]` of the result.
    """
    if not has_kernels(x_TE.device, x_TE.dtype):
        return x_TE.index_select(0, index_K)
    found: Tensor = _SelectRows.apply(x_TE, index_K, starts_T, uses_K)  # type: ignore[no-untyped-call]
    return found


def apply_linears(x_TE: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return what each of `layers` makes of the same input; gradients of plain ones are added by the products."""
    if any(type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter for layer in layers):
        return [layer(x_TE) for layer in layers]  # adapters, or weights that are cut over ranks
    tensors = [one for layer in layers for one in (layer.weight, layer.bias)]
    return list(_Linears.apply(x_TE, *tensors))  # type: ignore[no-untyped-call]


def apply_joined_linears(x_TE: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the same as `apply_linears` from one product, which is faster where some of the layers are narrow."""
    plain = all(type(layer) is nn.Linear and type(layer.weight) is nn.Parameter for layer in layers)
    if not plain or len({layer.bias is None for layer in layers}) > 1:
        return apply_linears(x_TE, layers)
    tensors = [one for layer in layers for one in (layer.weight, layer.bias)]
    return list(_JoinedLinears.apply(x_TE, *tensors))  # type: ignore[no-untyped-call]


@cache
def _kernels() -> Any:
    return import_module("headway.trainers.local.triton_layers")


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total_TE, out_TE, scale_T = _kernels().add_norm(x_TE, delta_TE, weight_E, eps)
        ctx.save_for_backward(total_TE, weight_E, scale_T)
        ctx.has_delta = delta_TE is not None
        ctx.set_materialize_grads(False)
        return total_TE, out_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total_TE: Tensor | None, grad_out_TE: Tensor | None) -> tuple[Tensor | None, ...]:
        total_TE, weight_E, scale_T = ctx.saved_tensors
        weight_grad = None
        grad_TE = grad_total_TE
        if grad_out_TE is not None:
            skip_TE = None if grad_total_TE is None else grad_total_TE.contiguous()
            needs_weight = ctx.needs_input_grad[2]
            grad_TE, weight_grad = _kernels().add_norm_backward(
                total_TE, weight_E, scale_T, grad_out_TE.contiguous(), skip_TE, needs_weight=needs_weight
            )
        return grad_TE, grad_TE if ctx.has_delta else None, weight_grad, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_TD, sin_TD)
        found: tuple[Tensor, Tensor] = _kernels().rotate(_join_heads(q_THD), _join_heads(k_THD), cos_TD, sin_TD)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q_THD: Tensor, grad_k_THD: Tensor) -> tuple[Tensor | None, ...]:
        grad_q_THD, grad_k_THD = grad_q_THD.contiguous(), grad_k_THD.contiguous()
        found = _kernels().rotate(grad_q_THD, grad_k_THD, *ctx.saved_tensors, back=True)
        return *found, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TE: Tensor, up_TE: Tensor) -> Tensor:
        gate_TE, up_TE = gate_TE.contiguous(), up_TE.contiguous()
        ctx.save_for_backward(gate_TE, up_TE)
        found: Tensor = _kernels().gate(gate_TE, up_TE)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor]:
        gate_TE, up_TE = ctx.saved_tensors
        found: tuple[Tensor, Tensor] = _kernels().gate_backward(gate_TE, up_TE, grad_TE.contiguous())
        return found


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, index_K: Tensor, starts_T: Tensor, uses_K: Tensor) -> Tensor:
        ctx.save_for_backward(starts_T, uses_K)
        return x_TE.index_select(0, index_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_KE: Tensor) -> tuple[Tensor | None, ...]:
        return _kernels().sum_uses(grad_KE.contiguous(), *ctx.saved_tensors), None, None, None


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = tensors[::2], tensors[1::2]
        ctx.save_for_backward(x_TE, *weights)
        return tuple(
            nn.functional.linear(x_TE, weight, bias)  # type: ignore[arg-type]
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, *weights = ctx.saved_tensors
        grad_x_TE: Tensor | None = None
        found: list[Tensor | None] = []
        for number, (grad_TE, weight) in enumerate(zip(grads, weights, strict=True)):
            if ctx.needs_input_grad[0]:
                grad_x_TE = grad_TE @ weight if grad_x_TE is None else grad_x_TE.addmm_(grad_TE, weight)
            found.append(grad_TE.t() @ x_TE if ctx.needs_input_grad[1 + 2 * number] else None)
            found.append(_sum_rows(grad_TE) if ctx.needs_input_grad[2 + 2 * number] else None)
        return grad_x_TE, *found


class _JoinedLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights: Any = tensors[::2]
        biases: Any = tensors[1::2]
        ctx.save_for_backward(x_TE, *weights)
        bias = None if biases[0] is None else torch.cat(biases)
        return torch.split(nn.functional.linear(x_TE, torch.cat(weights), bias), [len(one) for one in weights], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad
        sizes = [len(one) for one in weights]
        grad_TE = torch.cat(grads, 1)
        found: list[Tensor | None] = [None] * len(needs)
        if any(needs[::2]):
            found[::2] = torch.split(grad_TE.t() @ x_TE, sizes)
        if any(needs[1::2]):
            found[1::2] = torch.split(_sum_rows(grad_TE), sizes)
        return grad_TE @ torch.cat(weights) if needs_x else None, *found


def _join_heads(x_THD: Tensor) -> Tensor:
    """Return x with the heads of a token side by side; the rows of tokens may lie apart."""
    return x_THD if x_THD.stride()[1:] == (x_THD.shape[2], 1) else x_THD.contiguous()


def _sum_rows(x_TE: Tensor) -> Tensor:
    """Return the sum over all rows as a matrix product, which is faster than a reduction along strides."""
    return (x_TE.new_ones(1, len(x_TE)) @ x_TE)[0]
