"""Finds the lines of text in a picture of any size, with the detection network of PP-OCR.

The network gives a probability for every pixel to belong to text. Connected pixels above a threshold are one line; its
box is enlarged, because the network marks only the core of the letters. Boxes are upright: a line may be tilted by a
few degrees, not more. They come in reading order, from top to bottom and from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PixelClassifier = Callable[["NDArray[np.float32]"], "NDArray[np.float32]"]
"""The network: from `float32 [3, height, width]` in −1 … 1, blue first, to the probabilities `[height, width]`."""

_SHORTEST_SIDE, _LONGEST_SIDE, _STRIDE = 320, 2016, 32
"""Size of the picture for the network: sides are multiples of the stride."""
_PIXEL_THRESHOLD, _LINE_THRESHOLD = 0.3, 0.5
_SMALLEST_SIDE = 3
_ENLARGEMENT = 1.6
"""How far a box is enlarged, in areas per perimeter. Thresholds and enlargement are those of PP-OCR."""


class TextBox(NamedTuple):
    """One line of text in pixels; the ends are excluded."""

    top: int
    bottom: int
    left: int
    right: int


def find_text_boxes(pixels: NDArray[np.uint8], classify: PixelClassifier) -> list[TextBox]:
    """Return the lines of text in the picture `uint8 [height, width, 3]` in reading order."""
    import numpy as np
    from PIL import Image as Pillow

    height, width = pixels.shape[:2]
    scaled_width, scaled_height = _choose_size(height, width)
    scaled = Pillow.fromarray(pixels).resize((scaled_width, scaled_height), Pillow.Resampling.BILINEAR)
    network_input = (np.asarray(scaled, dtype=np.float32) / 127.5 - 1.0)[:, :, ::-1].transpose(2, 0, 1)
    probabilities = classify(np.ascontiguousarray(network_input))
    scale_y, scale_x = height / scaled_height, width / scaled_width
    found = []
    for box in find_connected_boxes(probabilities > _PIXEL_THRESHOLD):
        core = probabilities[box.top : box.bottom, box.left : box.right]
        tall, wide = core.shape
        if min(tall, wide) < _SMALLEST_SIDE or core[core > _PIXEL_THRESHOLD].mean() < _LINE_THRESHOLD:
            continue
        margin = _ENLARGEMENT * tall * wide / (2 * (tall + wide))
        found.append(
            TextBox(
                max(0, round((box.top - margin) * scale_y)),
                min(height, round((box.bottom + margin) * scale_y)),
                max(0, round((box.left - margin) * scale_x)),
                min(width, round((box.right + margin) * scale_x)),
            )
        )
    return sort_in_reading_order(found)


def _choose_size(height: int, width: int) -> tuple[int, int]:
    """Return width and height for the network: small pictures are enlarged, very large ones reduced."""
    scale = max(1.0, _SHORTEST_SIDE / min(height, width))
    scale = min(scale, _LONGEST_SIDE / max(height, width))
    wide, tall = (max(_STRIDE, round(side * scale / _STRIDE) * _STRIDE) for side in (width, height))
    return wide, tall


def find_connected_boxes(mask: NDArray[np.bool_]) -> list[TextBox]:
    """Return the bounding box of every connected region of `mask`; pixels that touch at a corner are connected."""
    import numpy as np

    boxes: list[TextBox] = []
    parents: list[int] = []

    def find_root(label: int) -> int:
        while parents[label] != label:
            parents[label] = parents[parents[label]]
            label = parents[label]
        return label

    above: list[tuple[int, int, int]] = []
    for row in np.flatnonzero(mask.any(axis=1)).tolist():
        edges = np.flatnonzero(np.diff(np.concatenate(([False], mask[row], [False])).astype(np.int8))).tolist()
        touching = above if above and boxes[above[0][2]].bottom == row else []
        runs = []
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            label = len(boxes)
            boxes.append(TextBox(row, row + 1, left, right))
            parents.append(label)
            for start, end, other in touching:
                if start <= right and left <= end:
                    parents[find_root(other)] = find_root(label)
            runs.append((left, right, label))
        above = runs
    regions: dict[int, list[TextBox]] = {}
    for label, box in enumerate(boxes):
        regions.setdefault(find_root(label), []).append(box)
    return [_enclose(parts) for parts in regions.values()]


def _enclose(parts: Iterable[TextBox]) -> TextBox:
    tops, bottoms, lefts, rights = zip(*parts, strict=True)
    return TextBox(min(tops), max(bottoms), min(lefts), max(rights))


def sort_in_reading_order(boxes: Iterable[TextBox]) -> list[TextBox]:
    """Return boxes from top to bottom; boxes whose middles lie beside each other are read from left to right."""
    rows: list[list[TextBox]] = []
    for box in sorted(boxes, key=lambda box: box.top + box.bottom):
        middle = (box.top + box.bottom) / 2
        if rows and rows[-1][0].top <= middle < rows[-1][0].bottom:
            rows[-1].append(box)
        else:
            rows.append([box])
    return [box for row in rows for box in sorted(row, key=lambda box: box.left)]
