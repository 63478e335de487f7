"""Evaluation of image models: draw held-out strings, read them by OCR, and compare pictures in a grid.

The noise of a picture follows from the seed and its prompt, and sampling is the ODE. So two models draw the same
prompts from the same noise, and a difference between their pictures is a difference between the models.

Legend: B pictures, C channels, H height, W width.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headway.algorithms.denoising import VelocityFunction, apply_guidance, make_timesteps, solve_ode
from headway.rewards.images.image_reward import array_to_image
from headway.rewards.images.ocr_reward import ImageReader, measure_agreement
from headway.seeding import make_rng
from headway.types import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headway.denoising.models.denoiser import Denoiser

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Legibility:
    """How well OCR reads strings in their pictures."""

    reward: float
    """Mean of the OCR reward."""
    exact: float
    """Share of pictures that hold the whole string."""
    samples: int


@torch.no_grad()
def draw_images(
    model: Denoiser,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    steps: int = 10,
    shift: float = 3.0,
    guidance: float = 1.0,
) -> list[Image]:
    """Draw a picture of each prompt by the ODE."""
    images: list[Image] = []
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        noise_BCHW = torch.stack([_draw_noise(prompt, model.latent_shape, seed) for prompt in batch])
        x_BCHW = solve_ode(_make_velocity(model, batch, guidance), noise_BCHW, make_timesteps(steps, shift))
        images += [array_to_image(pixels) for pixels in pictures_to_bytes(model.decode(x_BCHW))]
    return images


def _make_velocity(model: Denoiser, prompts: Sequence[str], guidance: float) -> VelocityFunction:
    conditional, unconditional = model.encode(prompts), model.encode([""] * len(prompts))

    def velocity(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        v = model(x, s, conditional)
        return v if guidance == 1.0 else apply_guidance(v, model(x, s, unconditional), guidance)

    return velocity


def pictures_to_bytes(pictures_BCHW: torch.Tensor) -> NDArray[np.uint8]:
    """Convert pictures in [0, 1] to `uint8 [B, H, W, C]`."""
    made: NDArray[np.uint8] = pictures_BCHW.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return made


async def measure_legibility(images: Sequence[Image], texts: Sequence[str], read: ImageReader) -> Legibility:
    """Compare what `read` (see `rewards.images.ocr_reward.make_reader`) finds in pictures with `texts`."""
    found = await asyncio.gather(*map(read, images))
    rewards = [measure_agreement(text, one) for text, one in zip(texts, found, strict=True)]
    count = len(rewards)
    return Legibility(reward=sum(rewards) / count, exact=sum(value == 1.0 for value in rewards) / count, samples=count)


def _draw_noise(prompt: str, shape: tuple[int, int, int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(make_rng(seed, "picture", prompt).randrange(0, 2**63))
    return torch.randn(shape, generator=generator)
