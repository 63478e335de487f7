"""Answers to tasks of reasoning-gym, by its own scoring, in worker processes.

Its tasks parse answers as expressions, programs and boards, which can take for ever on some texts: a call that takes
too long or too much memory has no score. A task brings everything needed under `reasoning_gym` in its data.
"""

from __future__ import annotations

import importlib.util
import json
from ast import literal_eval
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headway.errors import ConfigError
from headway.rewards.answer_extraction import get_expected_answer, make_extractor
from headway.rewards.function_reward import BuiltInReward
from headway.rewards.reward_worker_pool import RewardWorkerPool

_MAX_CHARACTERS = 20_000
"""Only so many characters at the end of the text are scored."""


def make_reasoning_gym_reward(
    *, answer: str = "answer", part: str = "all", timeout_s: float = 10.0, concurrency: int = 2
) -> BuiltInReward:
    """Give the score, from 0 to 1, of reasoning-gym for `part` of the text; 0 if there is no such part."""
    if importlib.util.find_spec("reasoning_gym") is None:
        hint = "pip install 'headway[data]'"
        raise ConfigError("needs reasoning-gym", key="reward_fn", value="reasoning_gym", hint=hint)
    extract, workers = make_extractor(part), RewardWorkerPool(concurrency)

    async def score(text: str, data: Mapping[str, Any]) -> float:
        entry, found = get_expected_answer(data, "reasoning_gym"), extract(text)
        if found is None:
            return 0.0
        task, options, metadata = entry["task"], entry["options"], entry["metadata"]
        args = (task, options, metadata, data.get(answer), found.strip()[-_MAX_CHARACTERS:])
        return float(await workers.call(f"{__name__}:score_answer", *args, timeout_s=timeout_s))

    return BuiltInReward("reasoning_gym", score)


def prepare() -> None:
    """Import the library in the worker before the time of the first call starts."""
    import reasoning_gym  # noqa: F401


def score_answer(task: str, options: dict[str, Any], metadata: str, answer: str | None, text: str) -> float:
    """Return the task's score of `text`. Runs in a worker. `metadata` is a Python literal: JSON has no tuples."""
    entry = {"answer": answer, "metadata": literal_eval(metadata)}
    return float(_make_dataset(task, json.dumps(options, sort_keys=True)).score_answer(text, entry))


@lru_cache(maxsize=32)
def _make_dataset(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))
