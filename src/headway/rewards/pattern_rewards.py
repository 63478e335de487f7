"""Form instead of content: a regular expression that must match, and tags that must enclose.

Expressions come from the configuration but meet any text, and some take exponential time on the wrong one while holding
the interpreter. They run in worker processes; one that takes too long is a failed reward, not a stalled run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headway.errors import ConfigError
from headway.rewards.answer_extraction import get_expected_answer
from headway.rewards.function_reward import AsyncReward, InlineReward
from headway.rewards.reward_worker_pool import RewardWorkerPool


def make_regex_reward(
    *,
    pattern: str,
    match: Literal["search", "full"] = "search",
    group: int | str | None = None,
    answer: str = "answer",
    ignore_case: bool = False,
    timeout_s: float = 2.0,
    concurrency: int = 2,
) -> AsyncReward:
    """1 where `pattern` matches (`.` and `^` see lines as `(?s)` and `(?m)` in it say), else 0.

    With `group`, that group of the last match must also equal the task's `answer`.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"is no regular expression: {error}", key="pattern", value=pattern) from error
    if group is not None and group not in compiled.groupindex and group not in range(compiled.groups + 1):
        raise ConfigError("is no group of the pattern", key="group", value=group)
    if match not in ("search", "full"):
        raise ConfigError("must be search or full", key="match", value=match)
    workers = RewardWorkerPool(concurrency)

    async def judge(text: str, data: Mapping[str, Any]) -> float:
        found = await workers.call(
            f"{__name__}:find_match", pattern, text, match, group, ignore_case, timeout_s=timeout_s
        )
        if found is None or group is None:
            return float(found is not None)
        return float(found.strip() == str(get_expected_answer(data, answer)).strip())

    return AsyncReward("regex", judge)


def find_match(pattern: str, text: str, match: str, group: int | str | None, ignore_case: bool) -> str | None:
    """Runs in a worker: the group of the last match, or `None`."""
    flags = re.IGNORECASE if ignore_case else 0
    if match == "full":
        found = re.fullmatch(pattern, text, flags)
    elif group is None:
        found = re.search(pattern, text, flags)
    else:
        *_, found = (None, *re.finditer(pattern, text, flags))
    return None if found is None else found.group(group or 0) or ""


def make_format_reward(*, names: Sequence[str] = ("think", "answer"), only: bool = True) -> InlineReward:
    """1 where each `<name>…</name>` stands exactly once and in this order, else 0.

    `only`: nothing but white space stands outside them.
    """
    if not names or isinstance(names, str):
        raise ConfigError("must be a list of tag names", key="names", value=names)

    def judge(text: str, data: Mapping[str, Any]) -> float:
        rest = text
        for name in names:
            opening, closing = f"<{name}>", f"</{name}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return 0.0
            before, found, rest = rest.partition(opening)
            _, closed, rest = rest.partition(closing)
            if not found or not closed or (only and before.strip()):
                return 0.0
        return float(not (only and rest.strip()))

    return InlineReward("tags", judge)
