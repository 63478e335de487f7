"""Moments of an optimizer in 8 bits, and weights rounded to bf16, both without a bias.

Blocks of 256 numbers share one scale, which is the largest of them. A number is stored as one of 256 codes, which are
dense near the scale and reach down to a millionth of it. A number between two codes becomes one of them by chance, so
that its expected value is kept: rounded to the nearest code, a mean that moves by a thousandth a step would never move.
Roots of second moments are stored, not their squares, and a root above zero never becomes zero: a step divides by it.
"""

from functools import cache

import torch
from torch import Tensor

BLOCK = 256
"""Numbers with a common scale."""
SMALLEST_TENSOR = 4096
"""Tensors with fewer elements, such as norms and biases, keep their moments in float32."""
ZERO_CODE = 127
"""Code of zero among signed numbers; among others it is 0."""
_DECADES = 7
"""Orders of magnitude below the scale that codes reach."""


@cache
def make_codes(device: torch.device, *, signed: bool) -> Tensor:
    """Return 256 ascending numbers up to 1: each order of magnitude has twice as many as the one below."""
    found = [0.0, 1.0]
    for decade in reversed(range(_DECADES)):
        count = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        values = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)).tolist()
        found += values + ([-value for value in values] if signed else [])
    if signed:
        found[-1] = -1.0  # in the place of the smallest negative number
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def quantize(
    values: Tensor, codes_out: Tensor, scales_out: Tensor, *, signed: bool, generator: torch.Generator
) -> None:
    """Store flat `values` as codes and the scales of their blocks; without `signed` they are not negative."""
    codes, count = make_codes(values.device, signed=signed), values.numel()
    blocks = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    torch.amax(blocks.abs(), 1, out=scales_out)
    relative = (blocks / scales_out.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).view(-1)[:count].contiguous()
    below = torch.bucketize(relative, codes, out_int32=True).sub_(1).clamp_(0, 254)
    low = codes[below]
    share = relative.sub(low).div_(codes[below + 1] - low)
    below += torch.rand(count, generator=generator, device=values.device) < share
    if not signed:
        below = torch.where(relative > 0, below.clamp_min_(1), below)
    codes_out.copy_(below)


def dequantize(stored: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the flat numbers that `quantize` stored."""
    values = make_codes(stored.device, signed=signed)[stored.int()]
    count = values.numel()
    blocks = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    return (blocks * scales[:, None]).view(-1)[:count]


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 `values` in bf16: the closer of the two neighbours is the likelier one."""
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, generator=generator, device=values.device)
    return noise.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
