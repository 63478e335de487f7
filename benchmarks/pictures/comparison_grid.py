"""A grid of pictures before and after training, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.rewards.images.image_reward import array_to_image, image_to_array
from headway.types import Image

_FRAME_PIXELS, _GAP_PIXELS = 2, 10


def make_comparison_grid(before: Sequence[Image], after: Sequence[Image], *, columns: int = 4, scale: int = 3) -> Image:
    """Return a grid of pairs: each picture before training, with the same prompt after training beside it."""
    pairs = [
        np.concatenate([_enlarge_and_frame(one, scale), _enlarge_and_frame(two, scale)], axis=1)
        for one, two in zip(before, after, strict=True)
    ]
    pairs += [np.full_like(pairs[0], 255)] * (-len(pairs) % columns)
    gap = np.full((pairs[0].shape[0], _GAP_PIXELS, 3), 255, dtype=np.uint8)
    rows = [
        np.concatenate([part for pair in pairs[start : start + columns] for part in (pair, gap)][:-1], axis=1)
        for start in range(0, len(pairs), columns)
    ]
    return array_to_image(np.concatenate(rows, axis=0))


def _enlarge_and_frame(image: Image, times: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    pixels = image_to_array(image)
    large = pixels.repeat(times, axis=0).repeat(times, axis=1)
    return np.pad(large, ((_FRAME_PIXELS,) * 2, (_FRAME_PIXELS,) * 2, (0, 0)), constant_values=128)
