"""Episodes that end with a picture, and what a reward says about them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from headway.rewards.base import Reward
from headway.rewards.images.image_reward import array_to_image
from headway.types import DenoisingStep, Episode, FinishReason, Generation, Image, Score, Task, Turn


def written(text: str, *, height: int = 16, width: int = 32, size: int = 12) -> Image:
    """Dark letters on light paper."""
    paper = Pillow.new("L", (width, height), 240)
    ImageDraw.Draw(paper).text((2, 1), text, fill=10, font=ImageFont.load_default(size))
    return array_to_image(np.asarray(paper))


def photographed(lines: list[str], *, side: int, size: int, seed: int = 0) -> Image:
    """Lines of text on signs in a colourful square picture, each somewhere else."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side] / side
    waves = [np.sin(3 * x + 1), np.cos(4 * y + 2), np.sin(2 * (x + y))]
    noise = rng.normal(0, 8, (side, side, 3))
    paper = Pillow.fromarray(np.clip(130 + 90 * np.stack(waves, -1) + noise, 0, 255).astype(np.uint8))
    draw, font = ImageDraw.Draw(paper), ImageFont.load_default(size)
    for number, text in enumerate(lines):
        wide = draw.textlength(text, font=font)
        left, top = (side - wide - 12) * rng.random() + 6, side * (0.1 + 0.8 * number / len(lines))
        draw.rectangle((left - 6, top - 4, left + wide + 6, top + 1.3 * size), fill=(250, 245, 230))
        draw.text((left, top), text, fill=(20, 20, 30), font=font)
    return array_to_image(np.asarray(paper))


def episode(image: Image | None, **data: Any) -> Episode:
    """One turn that drew the picture, or nothing."""
    actions = (DenoisingStep(), DenoisingStep(image=image)) if image is not None else ()
    generation = Generation(actions=actions, logps=(0.0,) * len(actions), runs=(), finish=FinishReason.STOP)
    turn = Turn(observation=(), generation=generation)
    return Episode(sample_id="7.0", task=Task(position=0, data=data), turns=(turn,))


def scored(reward: Reward, image: Image | None, **data: Any) -> Score:
    """The whole verdict."""
    return asyncio.run(reward.score(episode(image, **data)))
