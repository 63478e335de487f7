"""Chunked log-probabilities against the plain computation, gradients included, and what they never hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.algorithms.logprobs import CHUNK_LOGITS, compute_token_logps
from tests.algorithms.factory import generator

POSITIONS, HIDDEN, VOCABULARY = 11, 5, 17


def inputs(seed: int = 0, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Hidden states, head, bias and chosen tokens."""
    random = generator(seed)
    shapes = [(POSITIONS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)]
    made: list[Any] = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    if not bias:
        made[2] = None
    return [*made, torch.randint(0, VOCABULARY, (POSITIONS,), generator=random)]


def plainly(hidden: Tensor, head: Tensor, bias: Tensor | None, token: Tensor, temperature: float) -> list[Tensor]:
    log_p = (torch.nn.functional.linear(hidden, head, bias) / temperature).log_softmax(-1)
    return [log_p.gather(1, token[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)]


def chunked(
    hidden: Tensor, head: Tensor, bias: Tensor | None, token: Tensor, temperature: float, chunk: int
) -> list[Tensor]:
    made = compute_token_logps(hidden, head, token, bias_V=bias, temperature=temperature, chunk=chunk)
    return [made.logp_N, made.entropy_N]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_values_and_gradients_are_those_of_the_plain_computation(chunk: int, temperature: float, bias: bool) -> None:
    hidden, head, offset, token = inputs(bias=bias)
    learned = [x for x in (hidden, head, offset) if x is not None]
    upstream = [torch.randn(POSITIONS, generator=generator(9), dtype=torch.float64) for _ in range(2)]
    expected = plainly(hidden, head, offset, token, temperature)
    found = chunked(hidden, head, offset, token, temperature, chunk)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, learned, upstream)
    for one, other in zip(torch.autograd.grad(found, learned, upstream), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_two_alone_has_its_own_gradient(which: int) -> None:
    hidden, head, bias, token = inputs(4)
    wanted = torch.autograd.grad(plainly(hidden, head, bias, token, 0.7)[which].sum(), [hidden, head, bias])
    found = torch.autograd.grad(chunked(hidden, head, bias, token, 0.7, 4)[which].sum(), [hidden, head, bias])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_what_is_not_a_number_is_not_hidden() -> None:
    hidden, head, _, token = inputs(4)
    made = compute_token_logps(hidden * torch.nan, head, token, chunk=4)
    assert made.logp_N.isnan().all()
    assert made.entropy_N.isnan().all()


def test_gradients_pass_finite_differences() -> None:
    hidden, head, bias, token = inputs(3)
    assert torch.autograd.gradcheck(lambda h, w, b: tuple(chunked(h, w, b, token, 0.8, 4)), (hidden, head, bias))


def test_a_frozen_head_gets_no_gradient_and_a_frozen_body_none_either() -> None:
    hidden, head, _, token = inputs(bias=False)
    compute_token_logps(hidden, head.detach(), token, chunk=3).logp_N.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    compute_token_logps(hidden.detach(), head, token, chunk=3).logp_N.sum().backward()  # type: ignore[no-untyped-call]
    expected = torch.autograd.grad(plainly(hidden, head, None, token, 1.0)[0].sum(), [hidden, head])
    torch.testing.assert_close(hidden.grad, expected[0])
    torch.testing.assert_close(head.grad, expected[1])


def test_half_precision_is_reduced_in_single() -> None:
    hidden, head, bias, token = inputs(dtype=torch.bfloat16)
    made = compute_token_logps(hidden, head, token, bias_V=bias, chunk=4)
    assert made.logp_N.dtype == made.entropy_N.dtype == torch.float32
    expected = plainly(hidden.double(), head.double(), bias.double(), token, 1.0)[0]
    torch.testing.assert_close(made.logp_N.double(), expected, rtol=0.05, atol=0.05)
    (made.logp_N.sum() + made.entropy_N.sum()).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad.dtype == head.grad.dtype == bias.grad.dtype == torch.bfloat16


def test_a_forbidden_token_spoils_neither_entropy_nor_gradient() -> None:
    hidden, head, bias, token = inputs()
    shut = bias.detach().clone()
    shut[3] = -torch.inf
    token = torch.where(token == 3, torch.zeros_like(token), token)
    made = compute_token_logps(hidden, head, token, bias_V=shut, chunk=4)
    (made.logp_N.sum() + made.entropy_N.sum()).backward()  # type: ignore[no-untyped-call]
    for value in (made.logp_N, made.entropy_N, hidden.grad, head.grad):
        assert torch.isfinite(value).all()
    assert (head.grad[3] == 0).all()


def test_large_logits_do_not_overflow() -> None:
    hidden, head, bias, token = inputs(dtype=torch.float32)
    made = compute_token_logps(hidden * 1e4, head, token, bias_V=bias, chunk=4)
    (made.logp_N.sum() + made.entropy_N.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(made.logp_N).all()
    assert torch.isfinite(made.entropy_N).all()
    assert torch.isfinite(hidden.grad).all()


def test_no_positions_are_no_problem() -> None:
    hidden, head, bias, token = inputs()
    made = compute_token_logps(hidden[:0], head, token[:0], bias_V=bias)
    made.logp_N.sum().backward()  # type: ignore[no-untyped-call]
    assert made.logp_N.shape == (0,)
    assert (head.grad == 0).all()


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, list | tuple) else (made,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return made


def test_neither_pass_ever_makes_all_logits_and_none_are_kept() -> None:
    positions, hidden, vocabulary, chunk = 256, 8, 512, 16
    random = generator(1)
    hidden_NH = torch.randn(positions, hidden, generator=random).requires_grad_()
    head_VH = torch.randn(vocabulary, hidden, generator=random).requires_grad_()
    token_N = torch.randint(0, vocabulary, (positions,), generator=random)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    largest = Largest()  # type: ignore[no-untyped-call]
    with largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = compute_token_logps(hidden_NH, head_VH, token_N, chunk=chunk)
        (made.logp_N.sum() + made.entropy_N.sum()).backward()  # type: ignore[no-untyped-call]
    assert largest.elements == chunk * vocabulary < positions * vocabulary
    assert sum(kept) <= positions * hidden + vocabulary * hidden + 4 * positions


def test_a_single_chunk_is_kept_and_may_be_used_twice() -> None:
    hidden, head, bias, token = inputs(6)
    made = chunked(hidden, head, bias, token, 0.7, POSITIONS)
    twice = [torch.autograd.grad(made[0].sum() + made[1].sum(), [hidden, head], retain_graph=True) for _ in range(2)]
    wanted = torch.autograd.grad(sum(plainly(hidden, head, bias, token, 0.7)).sum(), [hidden, head])  # type: ignore[union-attr]
    for found in twice:
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_size_of_a_chunk_follows_from_the_vocabulary() -> None:
    positions, vocabulary = 40, CHUNK_LOGITS // 16
    hidden_NH, head_VH = torch.zeros(positions, 1), torch.zeros(vocabulary, 1)
    with Largest() as largest, torch.no_grad():  # type: ignore[no-untyped-call]
        made = compute_token_logps(hidden_NH, head_VH, torch.zeros(positions, dtype=torch.int64))
    assert largest.elements == CHUNK_LOGITS
    torch.testing.assert_close(made.entropy_N, -made.logp_N)
