"""The quick linear layer is a linear layer."""

from __future__ import annotations

import torch
from torch import nn

from headway.denoising.models.mmdit import FastCpuLinear
from tests.denoising_models.factory import noise


def test_it_is_the_linear_layer_of_torch() -> None:
    quick, plain = FastCpuLinear(6, 5), nn.Linear(6, 5)
    plain.load_state_dict(quick.state_dict())
    for x in (noise(3, 4, 6), noise(2, 6), noise(6), noise(3, 6).t().contiguous().t()):
        torch.testing.assert_close(quick(x), plain(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert quick(noise(3, 6)).dtype == torch.bfloat16


def test_its_gradients_are_finite_differences() -> None:
    quick = FastCpuLinear(3, 2).double()
    x = noise(4, 2, 3, dtype=torch.float64).requires_grad_()
    weights = (quick.weight.detach().clone().requires_grad_(), quick.bias.detach().clone().requires_grad_())

    def applied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.func.functional_call(quick, {"weight": weight, "bias": bias}, (x,))
        return made

    assert torch.autograd.gradcheck(applied, (x, *weights))


def test_a_frozen_one_passes_gradients_on() -> None:
    quick = FastCpuLinear(3, 2).requires_grad_(False)
    x = noise(4, 3).requires_grad_()
    quick(x).sum().backward()
    assert quick.weight.grad is None
    assert x.grad is not None
    torch.testing.assert_close(x.grad, quick.weight.sum(0).expand(4, 3))
