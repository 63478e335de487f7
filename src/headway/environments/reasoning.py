"""Puzzles of reasoning-gym as an environment: an entry from the seed, judged by its own scorer, with several tries."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from headway.environments.text import Reply
from headway.errors import ConfigError

_RIGHT = 0.999


class ReasoningGym:
    """`task` and its options; `tries` answers to a question, each judged and told."""

    instructions = "Answer with the answer alone."
    reusable = True

    def __init__(self, task: str, *, tries: int = 1, **options: Any) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError("needs the package reasoning-gym", key="task", value=task) from error
        if task not in DATASETS:
            close = get_close_matches(task, DATASETS, n=1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"is no task of reasoning-gym{meant}", key="task", value=task)
        if tries < 1:
            raise ConfigError("must be at least 1", key="tries", value=tries)
        self._make, self._task, self._options = reasoning_gym.create_dataset, task, options
        self.max_steps = tries
        try:
            self._dataset = self._make(task, size=1, seed=0, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym: {error}", key=task, value=options) from error

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self._dataset = self._make(self._task, size=1, seed=seed % 2**31, **self._options)
        self._entry, self._best, self._left = self._dataset[0], 0.0, self.max_steps
        return str(self._entry["question"])

    def step(self, action: str) -> Reply:
        """The reward of all tries together is that of the best."""
        score = float(self._dataset.score_answer(action.strip(), self._entry))
        gained, self._best = max(0.0, score - self._best), max(score, self._best)
        self._left -= 1
        right = score >= _RIGHT
        over = right or not self._left
        return Reply("Right." if right else "Not quite. Try again.", gained, over, success=right if over else None)
