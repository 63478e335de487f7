"""One number per sample beside tensors of any shape, and the precision that flow mathematics is done in.

Legend: B samples of a batch; `...` the dimensions of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32: half precision is for models, not for what is subtracted and divided here."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def beside(a_B: Tensor, x: Tensor) -> Tensor:
    """`a_B` in the precision of `x` [B, ...], shaped to be multiplied with it."""
    return a_B.to(device=x.device, dtype=x.dtype).reshape(-1, *(1,) * (x.dim() - 1))


def mean_per_sample(x: Tensor) -> Tensor:
    """Mean over everything but the batch, [B]."""
    return x.flatten(1).mean(1)
