"""A few answers of every step, kept so that one can read what the policy says and watch it change.

`samples.jsonl`, one object a line: step, prompt, answer, expected, reward, finish. Of each step the best and the worst
answer of its first groups. A disk that is full stops this log, not the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.types import Batch, Sample, SampleGroup

_GROUPS = 2


class SampleLog:
    """Told of every trained batch."""

    def __init__(self, path: Path, *, prompt: str = "prompt", answer: str | None = "answer") -> None:
        self._path, self._prompt, self._answer = path, prompt, answer

    def __call__(self, batch: Batch, trained: int) -> None:
        lines = [
            json.dumps(self._row(sample, trained), ensure_ascii=False)
            for group in batch.groups[:_GROUPS]
            for sample in _extremes(group)
        ]
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.write("".join(f"{line}\n" for line in lines))
        except OSError:
            return  # the ledger and the event log say what is wrong with the disk

    def _row(self, sample: Sample, trained: int) -> dict[str, Any]:
        task, last = sample.episode.task, sample.episode.turns[-1].generation
        return {
            "step": trained,
            "prompt": task.data.get(self._prompt, ""),
            "answer": last.text,
            "expected": task.data.get(self._answer) if self._answer else None,
            "reward": None if sample.score is None else sample.score.value,
            "finish": str(last.finish),
        }


def _extremes(group: SampleGroup) -> Iterator[Sample]:
    judged = sorted(group.samples, key=lambda sample: -(sample.score.value if sample.score else 0.0))
    yield judged[0]
    if len(judged) > 1:
        yield judged[-1]
