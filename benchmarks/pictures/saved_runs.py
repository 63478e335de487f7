"""Results of finished runs in one file: numbers and pictures before and after, to be read on another machine.

The file is an `.npz` without pickles. It is written whole after every run, so an interruption keeps finished runs.
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
    """The strings, their pictures before training, and for every run its numbers and the pictures after it."""

    strings: list[str]
    before: list[Image]
    machine: str
    read_before: dict[str, list[float]] = field(default_factory=dict)
    """Reward and share of exact strings, by reader."""
    cells: list[dict[str, Any]] = field(default_factory=list)
    after: list[list[Image]] = field(default_factory=list)
    """Pictures of each cell; empty if a run failed."""

    def add(self, cell: dict[str, Any], after: list[Image]) -> None:
        """Add one run; runs are ordered by α and seed."""
        self.cells.append(cell)
        self.after.append(after)
        order = sorted(range(len(self.cells)), key=lambda at: (self.cells[at]["alpha"], self.cells[at]["seed"]))
        self.cells, self.after = [self.cells[at] for at in order], [self.after[at] for at in order]

    def save(self, file: Path) -> None:
        """Write everything atomically."""
        facts = {"strings": self.strings, "machine": self.machine, "read_before": self.read_before, "cells": self.cells}
        arrays = {f"after_{number}": _stack(images) for number, images in enumerate(self.after) if images}
        part = file.with_suffix(".part.npz")
        np.savez_compressed(part, facts=np.array(json.dumps(facts)), before=_stack(self.before), **arrays)
        part.replace(file)


def load_saved_runs(file: Path) -> SavedRuns:
    """Read what `save` wrote."""
    with np.load(file, allow_pickle=False) as arrays:
        facts = json.loads(str(arrays["facts"]))
        names = [f"after_{number}" for number in range(len(facts["cells"]))]
        after = [_unstack(arrays[name]) if name in arrays else [] for name in names]
        return SavedRuns(before=_unstack(arrays["before"]), after=after, **facts)


def _stack(images: Sequence[Image]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.stack([image_to_array(image) for image in images])


def _unstack(pixels_NHWC: np.ndarray[Any, np.dtype[np.uint8]]) -> list[Image]:  # noqa: N803
    return [array_to_image(one) for one in pixels_NHWC]
