"""Held-out evaluation: the same noise for the same prompt, whatever else is drawn."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headway.denoising.image_evaluation import draw_images, measure_legibility  # noqa: E402
from headway.denoising.models.mmdit import MmditConfig, SmallMmdit  # noqa: E402
from headway.rewards.images.image_reward import array_to_image  # noqa: E402
from headway.types import Image  # noqa: E402


def test_a_prompt_is_drawn_from_the_same_noise_whatever_stands_beside_it() -> None:
    model = SmallMmdit(MmditConfig(dim=16, depth=1, heads=2))
    alone, beside, other = (
        draw_images(model, ["12"], steps=2),
        draw_images(model, ["7", "12"], steps=2),
        draw_images(model, ["12"], seed=1),
    )
    assert alone[0] == beside[1] != other[0]
    assert (alone[0].height, alone[0].width) == (16, 32)


def test_what_is_read_decides() -> None:
    async def read(image: Image) -> str:
        return "12" if image.pixels[0] else "13"

    images = [array_to_image(np.full((2, 2), value, np.uint8)) for value in (0, 255)]
    found = asyncio.run(measure_legibility(images, ["12", "12"], read))
    assert (found.reward, found.exact, found.samples) == (0.75, 0.5, 2)
