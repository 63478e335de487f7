"""Runs that were made, in one file: their numbers and the pictures before and after, for readers on another machine.

An `.npz` without anything pickled. Written whole after every run: what is cut off leaves those that were done.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.rewards.images.image_reward import array_to_image, image_to_array
from headway.types import Image


@dataclass(slots=True)
class SavedRuns:
    """The strings, how they were drawn at first, and for every run its numbers and how they were drawn at its end."""

    strings: list[str]
    before: list[Image]
    machine: str
    read_before: dict[str, list[float]] = field(default_factory=dict)
    """By reader: reward, share of exact strings."""
    cells: list[dict[str, Any]] = field(default_factory=list)
    after: list[list[Image]] = field(default_factory=list)
    """Of each cell; none where a run came to nothing."""

    def add(self, cell: dict[str, Any], after: list[Image]) -> None:
        """One run more; they stand in the order of α and seed."""
        self.cells.append(cell)
        self.after.append(after)
        order = sorted(range(len(self.cells)), key=lambda at: (self.cells[at]["alpha"], self.cells[at]["seed"]))
        self.cells, self.after = [self.cells[at] for at in order], [self.after[at] for at in order]

    def save(self, file: Path) -> None:
        """All of it, at once or not at all."""
        facts = {"strings": self.strings, "machine": self.machine, "read_before": self.read_before, "cells": self.cells}
        arrays = {f"after_{number}": _stacked(images) for number, images in enumerate(self.after) if images}
        part = file.with_suffix(".part.npz")
        np.savez_compressed(part, facts=np.array(json.dumps(facts)), before=_stacked(self.before), **arrays)
        part.replace(file)


def load_saved_runs(file: Path) -> SavedRuns:
    """What `save` wrote."""
    with np.load(file, allow_pickle=False) as arrays:
        facts = json.loads(str(arrays["facts"]))
        names = [f"after_{number}" for number in range(len(facts["cells"]))]
        after = [_apart(arrays[name]) if name in arrays else [] for name in names]
        return SavedRuns(before=_apart(arrays["before"]), after=after, **facts)


def _stacked(images: Sequence[Image]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.stack([image_to_array(image) for image in images])


def _apart(pixels_NHWC: np.ndarray[Any, np.dtype[np.uint8]]) -> list[Image]:  # noqa: N803
    return [array_to_image(one) for one in pixels_NHWC]
