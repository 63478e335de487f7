"""Held-out strings drawn by a model, read by one OCR or by two, and laid out in a grid.

The noise of a picture follows from the seed and its prompt, and sampling is the ODE, so that two models draw the same
prompts from the same noise, and a difference between their pictures is a difference between the models.

Legend: B pictures, C channels, H height, W width.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from headway.algorithms.denoising import apply_guidance, euler_step, make_timesteps
from headway.rewards.images.image_reward import array_to_image
from headway.rewards.images.ocr_reward import ImageReader, measure_agreement
from headway.seeding import make_rng
from headway.types import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headway.denoising.models import Denoiser

_BATCH = 64
_GAP = 2
_SPLIT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Legibility:
    """How well strings can be read in their pictures."""

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
    """A picture of each prompt, by the ODE."""
    images: list[Image] = []
    for start in range(0, len(prompts), _BATCH):
        some = prompts[start : start + _BATCH]
        x_BCHW = torch.stack([_noise(prompt, model.latent_shape, seed) for prompt in some])
        told, untold = model.encode(some), model.encode([""] * len(some))
        grid = make_timesteps(steps, shift)
        for s, s_next in pairwise(grid):
            s_B = s.expand(len(some))
            v_BCHW = model(x_BCHW, s_B, told)
            if guidance != 1.0:
                v_BCHW = apply_guidance(v_BCHW, model(x_BCHW, s_B, untold), guidance)
            x_BCHW = euler_step(x_BCHW, v_BCHW, s_B, s_next.expand(len(some)))
        images += [array_to_image(pixels) for pixels in pictures_to_bytes(model.decode(x_BCHW))]
    return images


def pictures_to_bytes(pictures_BCHW: torch.Tensor) -> NDArray[np.uint8]:
    """Pictures in [0, 1] as `uint8 [B, H, W, C]`."""
    made: NDArray[np.uint8] = pictures_BCHW.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return made


async def measure_legibility(images: Sequence[Image], texts: Sequence[str], read: ImageReader) -> Legibility:
    """What `read` (see `rewards.images.ocr.make_reader`) makes of pictures that should show `texts`."""
    found = await asyncio.gather(*map(read, images))
    rewards = [measure_agreement(text, said) for text, said in zip(texts, found, strict=True)]
    count = len(rewards)
    return Legibility(reward=sum(rewards) / count, exact=sum(value == 1.0 for value in rewards) / count, samples=count)


def make_comparison_grid(
    before: Sequence[Image], after: Sequence[Image], *, columns: int = 4, enlarged: int = 3
) -> Image:
    """A grid of pairs: each picture before, and beside it the same prompt after."""
    pairs = [
        np.concatenate([_framed(one, enlarged), _framed(two, enlarged)], axis=1)
        for one, two in zip(before, after, strict=True)
    ]
    pairs += [np.full_like(pairs[0], 255)] * (-len(pairs) % columns)
    gap = np.full((pairs[0].shape[0], _SPLIT, 3), 255, dtype=np.uint8)
    rows = [
        np.concatenate([part for pair in pairs[start : start + columns] for part in (pair, gap)][:-1], axis=1)
        for start in range(0, len(pairs), columns)
    ]
    return array_to_image(np.concatenate(rows, axis=0))


def _framed(image: Image, times: int) -> NDArray[np.uint8]:
    pixels = np.frombuffer(image.pixels, dtype=np.uint8).reshape(image.height, image.width, 3)
    large = pixels.repeat(times, axis=0).repeat(times, axis=1)
    return np.pad(large, ((_GAP, _GAP), (_GAP, _GAP), (0, 0)), constant_values=128)


def _noise(prompt: str, shape: tuple[int, int, int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(make_rng(seed, "picture", prompt).randrange(0, 2**63))
    return torch.randn(shape, generator=generator)
