"""One block of the multimodal transformer: two streams with their own weights, one attention over both.

Legend: B samples, T tokens of a stream, D width, K heads, E width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from headway.generative.models.products import Linear


def modulated(x_BTD: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Tensor:
    """Layer norm without weights of its own, then what the noise level and the prompt say."""
    normal = F.layer_norm(x_BTD, x_BTD.shape[-1:])
    return torch.addcmul(shift_BD[:, None], normal, 1 + scale_BD[:, None])


class Stream(nn.Module):
    """The weights of one stream in one block. The stream of the prompt ends in the last block, with its attention."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float, *, ends: bool) -> None:
        super().__init__()
        self.heads, self.ends = heads, ends
        hidden = int(dim * mlp_ratio)
        self.modulation = Linear(dim, (2 if ends else 6) * dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.qkv = Linear(dim, 3 * dim)
        self.query_norm, self.key_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)
        if not ends:
            self.out = Linear(dim, dim)
            self.mlp = nn.Sequential(Linear(dim, hidden), nn.GELU(approximate="tanh"), Linear(hidden, dim))

    def opened(self, x_BTD: Tensor, steer_BD: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Queries, keys and values [B, K, T, E], and the modulation that `closed` will want."""
        shift, scale, *rest = self.modulation(steer_BD).chunk(2 if self.ends else 6, dim=-1)
        qkv = self.qkv(modulated(x_BTD, shift, scale)).unflatten(-1, (3, self.heads, -1))
        # Queries and keys at once, in the order of memory: half the calls, and each of them faster.
        scale_2KE = torch.stack([self.query_norm.weight, self.key_norm.weight])[:, None]
        normal = F.rms_norm(qkv[:, :, :2], qkv.shape[-1:]) * scale_2KE
        q, k = normal.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, qkv[:, :, 2].transpose(1, 2), tuple(rest)

    def closed(self, x_BTD: Tensor, seen_BTD: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        """The stream after what it has seen."""
        if self.ends:
            return x_BTD
        gate, mlp_shift, mlp_scale, mlp_gate = rest
        x_BTD = torch.addcmul(x_BTD, gate[:, None], self.out(seen_BTD))
        return torch.addcmul(x_BTD, mlp_gate[:, None], self.mlp(modulated(x_BTD, mlp_shift, mlp_scale)))


class JointBlock(nn.Module):
    """Image and prompt attend to each other and to themselves at once."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float, *, last: bool) -> None:
        super().__init__()
        self.image = Stream(dim, heads, mlp_ratio, ends=False)
        self.text = Stream(dim, heads, mlp_ratio, ends=last)

    def forward(self, image_BTD: Tensor, text_BTD: Tensor, steer_BD: Tensor) -> tuple[Tensor, Tensor]:
        *image_qkv, image_rest = self.image.opened(image_BTD, steer_BD)
        *text_qkv, text_rest = self.text.opened(text_BTD, steer_BD)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(image_qkv, text_qkv, strict=True))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        patches = image_BTD.shape[1]
        image, text = seen[:, :patches], seen[:, patches:]
        return self.image.closed(image_BTD, image, image_rest), self.text.closed(text_BTD, text, text_rest)
