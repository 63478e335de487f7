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


def episode(image: Image | None, **data: Any) -> Episode:
    """One turn that drew the picture, or nothing."""
    actions = (DenoisingStep(), DenoisingStep(image=image)) if image is not None else ()
    generation = Generation(actions=actions, logps=(0.0,) * len(actions), runs=(), finish=FinishReason.STOP)
    turn = Turn(observation=(), generation=generation)
    return Episode(sample_id="7.0", task=Task(position=0, data=data), turns=(turn,))


def scored(reward: Reward, image: Image | None, **data: Any) -> Score:
    """The whole verdict."""
    return asyncio.run(reward.score(episode(image, **data)))
