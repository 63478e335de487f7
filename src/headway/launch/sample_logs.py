"""A few answers of every step, kept so that one can read what the policy says and watch it change.

`samples.jsonl`, one object a line: step, prompt, answer, expected, reward, finish. Of each step the best and the worst
answer of its first groups; of an episode what was said turn by turn. `images.jsonl`: the first pictures of every
validation, of the same prompts from the same noise each time. A disk that is full stops these logs, not the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.environments.text_episode import SEED_KEY
from headway.monitor.sample_excerpts import ImageLog
from headway.rewards.images.image_reward import image_to_png_base64
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.types import Batch, Image, Sample, SampleGroup

_GROUPS_PER_STEP = 2
_IMAGES_PER_VALIDATION = 24
_LONGEST_SIDE = 256
"""Pixels of a side that is kept: pictures are for looking at."""


class SampleLog:
    """Told of every trained batch; writes nothing where pictures were drawn."""

    def __init__(self, path: Path, *, prompt: str = "prompt", answer: str | None = "answer") -> None:
        self._path, self._prompt, self._answer = path, prompt, answer

    def __call__(self, batch: Batch, trained: int) -> None:
        lines = [
            json.dumps(self._row(sample, trained), ensure_ascii=False)
            for group in batch.groups[:_GROUPS_PER_STEP]
            for sample in _best_and_worst(group)
            if sample.episode.turns[-1].generation.image is None
        ]
        if not lines:
            return
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.write("".join(f"{line}\n" for line in lines))
        except OSError:
            return  # the ledger and the event log say what is wrong with the disk

    def _row(self, sample: Sample, trained: int) -> dict[str, Any]:
        task, last = sample.episode.task, sample.episode.turns[-1].generation
        begun = f"{task.domain}, seed {task.data[SEED_KEY]}" if SEED_KEY in task.data else ""
        said = [turn.generation.text for turn in sample.episode.turns]
        return {
            "step": trained,
            "prompt": task.data.get(self._prompt, begun),
            "answer": said[0] if len(said) == 1 else " → ".join(text.strip() for text in said),
            "expected": task.data.get(self._answer) if self._answer else None,
            "reward": None if sample.score is None else sample.score.value,
            "finish": str(last.finish),
        }


def _best_and_worst(group: SampleGroup) -> Iterator[Sample]:
    judged = sorted(group.samples, key=lambda sample: -(sample.score.value if sample.score else 0.0))
    yield judged[0]
    if len(judged) > 1:
        yield judged[-1]


class ImageSampleLog:
    """Told of every validation; writes nothing where nothing was drawn."""

    def __init__(self, path: Path, *, prompt: str = "prompt") -> None:
        self._log, self._prompt = ImageLog(path, prompts=_IMAGES_PER_VALIDATION), prompt

    def __call__(self, trained: int, judged: Sequence[EvaluatedSample]) -> None:
        drawn = [
            (str(one.task.data.get(self._prompt, "")), image_to_png_base64(downscale_image(image)), score.value)
            for one in judged[:_IMAGES_PER_VALIDATION]
            for episode, score in one.answers[:1]
            if (image := episode.turns[-1].generation.image) is not None
        ]
        if drawn:
            self._log(trained, drawn)


def downscale_image(image: Image, largest: int = _LONGEST_SIDE) -> Image:
    """Every so many pixels of it, so that no side is longer than `largest`."""
    step = -(-max(image.height, image.width) // largest)
    if step == 1:
        return image
    rows, wide = range(0, image.height, step), 3 * image.width
    pixels = b"".join(
        image.pixels[row * wide + 3 * column : row * wide + 3 * column + 3]
        for row in rows
        for column in range(0, image.width, step)
    )
    return Image(height=len(rows), width=len(range(0, image.width, step)), pixels=pixels)
