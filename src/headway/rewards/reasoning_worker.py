"""What worker processes do for `reasoning`. Imported only there: reasoning-gym is optional and slow to load."""

from __future__ import annotations

import json
from ast import literal_eval
from functools import lru_cache
from typing import Any

import reasoning_gym


def score_answer(task: str, options: dict[str, Any], metadata: str, answer: str | None, text: str) -> float:
    """What the task gives for `text`. `metadata` is a Python literal, because JSON has no tuples."""
    entry = {"answer": answer, "metadata": literal_eval(metadata)}
    return float(_dataset(task, json.dumps(options, sort_keys=True)).score_answer(text, entry))


@lru_cache(maxsize=32)
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(options))
