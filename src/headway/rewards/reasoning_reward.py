"""Answers to tasks of reasoning-gym, by its own scoring, in worker processes.

Its tasks parse answers as expressions, programs and boards, which can take for ever on the wrong text: a call that
takes too long or too much memory has no verdict. A task brings all that is needed under `make_reasoning_gym_reward` in its data.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.rewards.answer_extraction import get_expected_answer, make_extractor
from headway.rewards.function_reward import AsyncReward
from headway.rewards.reward_worker_pool import RewardWorkerPool

_LONGEST = 20_000
"""Characters of the text's end that are looked at."""


def make_reasoning_gym_reward(
    *, answer: str = "answer", part: str = "all", timeout_s: float = 10.0, concurrency: int = 2
) -> AsyncReward:
    """The score, from 0 to 1, that reasoning-gym gives `part` of the text; 0 where there is no such part."""
    if importlib.util.find_spec("reasoning_gym") is None:
        hint = "pip install 'headway[data]'"
        raise ConfigError("needs reasoning-gym", key="reward_fn", value="reasoning_gym", hint=hint)
    extract, workers = make_extractor(part), RewardWorkerPool(concurrency)

    async def judge(text: str, data: Mapping[str, Any]) -> float:
        entry, said = get_expected_answer(data, "reasoning_gym"), extract(text)
        if said is None:
            return 0.0
        args = (entry["task"], entry["options"], entry["metadata"], data.get(answer), said.strip()[-_LONGEST:])
        return float(await workers.call("headway.rewards.reasoning_worker:score_answer", *args, timeout_s=timeout_s))

    return AsyncReward("reasoning_gym", judge)
