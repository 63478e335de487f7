"""Mathematical answers, equal in value: `math-verify` in worker processes.

That library parses with regular expressions and asks a computer algebra system, both of which can take for ever on
the wrong text, and its own time limits are signals, which do not work beside an event loop. So its limits are off and
ours are on: a call that takes too long or too much memory has no verdict.
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


def make_math_reward(
    *,
    answer: str = "answer",
    part: str = "all",
    precision: int = 6,
    strict: bool = True,
    timeout_s: float = 5.0,
    concurrency: int = 2,
) -> AsyncReward:
    """1 where the answer in the text (`\\boxed{…}`, LaTeX or plain) equals the task's in value, else 0.

    `precision`: decimals that count. `strict`: variables and intervals must be written alike.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("needs math-verify", key="reward_fn", value="math", hint="pip install 'headway[math]'")
    extract, workers = make_extractor(part), RewardWorkerPool(concurrency)

    async def judge(text: str, data: Mapping[str, Any]) -> float:
        gold, said = str(get_expected_answer(data, answer)), extract(text)
        if said is None:
            return 0.0
        said = said if part == "all" else f"${said.strip().strip('$')}$"
        args = (gold, said[-_LONGEST:], precision, strict)
        return float(await workers.call("headway.rewards.math_worker:is_equal_value", *args, timeout_s=timeout_s))

    return AsyncReward("math", judge)
