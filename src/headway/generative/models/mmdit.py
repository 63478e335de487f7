"""A small multimodal diffusion transformer of our own: pictures of text from characters, on machines without weights.

Two streams, patches of the latent and characters of the prompt, each with its own weights, meet in joint attention;
noise level and prompt steer every block through adaptive layer norms, whose gates begin at 0 (the model begins as a
velocity of 0). The shape of Stable Diffusion 3 at one thousandth of its size; with a larger `MmditConfig` the same
code is a model of hundreds of millions of parameters.

Guarantees: the same configuration and seed give the same weights; a row's velocity depends on that row alone; saved as
`config.json` and `model.safetensors`. There is no VAE: pixels in [−1, 1] are the latents.

Legend: B samples, C channels, H height, W width, L characters, P patches, D width of the streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from headway.algorithms.flow import timesteps
from headway.generative.models.blocks import JointBlock, modulated
from headway.generative.models.denoiser import Conditioning
from headway.generative.models.products import Linear
from headway.generative.models.shape import FREQUENCIES, MmditConfig

_FASTEST = 1000.0


class SmallMmdit(nn.Module):
    """Implements `Denoiser`."""

    def __init__(self, config: MmditConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config = config or MmditConfig()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build(config)

    def _build(self, c: MmditConfig) -> None:
        patch = c.channels * c.patch**2
        self.patches = Linear(patch, c.dim)
        self.places = nn.Parameter(torch.randn(1, c.patches, c.dim) * 0.2)
        self.characters = nn.Embedding(len(c.alphabet) + 2, c.dim)
        self.orders = nn.Parameter(torch.randn(1, c.characters, c.dim) * 0.2)
        self.noise_level = nn.Sequential(Linear(2 * FREQUENCIES, c.dim), nn.SiLU(), Linear(c.dim, c.dim))
        self.prompt = nn.Sequential(Linear(c.dim, c.dim), nn.SiLU(), Linear(c.dim, c.dim))
        self.blocks = nn.ModuleList(
            JointBlock(c.dim, c.heads, c.mlp_ratio, last=index == c.depth - 1) for index in range(c.depth)
        )
        self.last_modulation = Linear(c.dim, 2 * c.dim)
        self.velocity = Linear(c.dim, patch)
        for gate in (self.last_modulation, self.velocity):
            nn.init.zeros_(gate.weight)
            nn.init.zeros_(gate.bias)
        nn.init.normal_(self.characters.weight, std=0.5)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.config.channels, self.config.height, self.config.width

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """One token a character: 0 is nothing, 1 a character it does not know. Longer prompts are refused."""
        ids = [self.config.tokens(prompt) for prompt in prompts]
        return Conditioning({"characters": torch.tensor(ids, dtype=torch.long, device=self.places.device)})

    def forward(self, x: Tensor, s: Tensor, conditioning: Conditioning) -> Tensor:
        weights = self.places.dtype
        text_BLD = self.characters(conditioning["characters"]) + self.orders
        image_BPD = self.patches(self._cut(x.to(weights))) + self.places
        steer_BD = self.noise_level(_waves(s, weights)) + self.prompt(text_BLD.mean(1))
        steer_BD = F.silu(steer_BD)
        for block in self.blocks:
            image_BPD, text_BLD = block(image_BPD, text_BLD, steer_BD)
        shift_BD, scale_BD = self.last_modulation(steer_BD).chunk(2, dim=-1)
        return self._joined(self.velocity(modulated(image_BPD, shift_BD, scale_BD)))

    def decode(self, x: Tensor) -> Tensor:
        pictures = ((x.detach().float() + 1) / 2).clamp(0, 1)
        return pictures.expand(-1, 3, -1, -1) if self.config.channels == 1 else pictures

    def grid(self, steps: int) -> Tensor:
        return timesteps(steps)

    def _cut(self, x_BCHW: Tensor) -> Tensor:
        """[B, C, H, W] → [B, P, C·patch²]."""
        c = self.config
        cut = x_BCHW.reshape(-1, c.channels, c.height // c.patch, c.patch, c.width // c.patch, c.patch)
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def _joined(self, patches_BPE: Tensor) -> Tensor:
        """The way back."""
        c = self.config
        grid = patches_BPE.reshape(-1, c.height // c.patch, c.width // c.patch, c.channels, c.patch, c.patch)
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, c.channels, c.height, c.width)


def _waves(s_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of the noise level at frequencies from 1 to 1000, [B, 2·64]."""
    wide_B = s_B.to(torch.promote_types(dtype, torch.float32))
    steps = torch.arange(FREQUENCIES, device=s_B.device, dtype=wide_B.dtype) / (FREQUENCIES - 1)
    angle = wide_B[:, None] * torch.exp(log(_FASTEST) * steps)[None]
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(dtype)


def parameters_of(model: nn.Module) -> int:
    """How many numbers it learns."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
