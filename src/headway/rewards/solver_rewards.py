"""Answers that a library checks in worker processes: mathematics by value, and tasks of reasoning-gym.

`math-verify` parses with regular expressions and calls a computer algebra system; reasoning-gym parses answers as
expressions, programs and boards. All of that can take for ever on some texts, and the time limits of math-verify are
signals, which do not work beside an event loop. So its limits are off, and the worker's limits apply: an answer that
uses up the processor time or the memory of its check is wrong, and one that merely waited too long has no score.
"""

import importlib.util
import json
import logging
from ast import literal_eval
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headway.errors import ConfigError
from headway.extras import suggest_install
from headway.rewards.base import extract_boxed, get_expected_answer, make_extractor, read_question
from headway.rewards.math_answer_checks import find_evasion, list_readings
from headway.rewards.reward_worker_pool import RewardLimitReached, RewardWorkerPool
from headway.rewards.scoring_functions import BuiltInReward
from headway.rewards.text_rewards import has_content
from headway.sandbox.expression_guard import guard_evaluation, score_puzzle

_MAX_CHARACTERS = 20_000
"""Only so many characters at the end of the text are checked."""


def make_math_reward(
    *,
    answer: str = "answer",
    part: str = "all",
    question: str = "prompt",
    precision: int = 6,
    strict: bool = True,
    timeout_s: float = 5.0,
    concurrency: int = 2,
) -> BuiltInReward:
    """Score 1 if the answer in the text (`\\boxed{…}`, LaTeX or plain) equals the task's in value, else 0.

    `precision`: decimals that count. `strict`: variables and intervals must be written alike. An answer that lists
    candidates, leaves a number to be computed, or repeats a part of the task's `question` scores 0.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("needs math-verify", key="reward_fn", value="math", hint=suggest_install("math"))
    extract, workers = make_extractor(part), RewardWorkerPool(concurrency)

    async def score(text: str, data: Mapping[str, Any]) -> float:
        expected, found = str(get_expected_answer(data, answer)), extract(text)
        if found is None:
            return 0.0
        found = found if part == "all" else f"${found.strip().strip('$')}$"
        args = (
            expected,
            found[-_MAX_CHARACTERS:],
            precision,
            strict,
            read_question(data.get(question))[-_MAX_CHARACTERS:],
        )
        return await _call_solver(workers, "is_equal_value", args, timeout_s)

    return BuiltInReward("math", score)


async def _call_solver(workers: RewardWorkerPool, function: str, args: tuple[Any, ...], timeout_s: float) -> float:
    try:
        return float(await workers.call(f"{__name__}:{function}", *args, timeout_s=timeout_s))
    except RewardLimitReached:
        return 0.0  # what the answer asks for cannot be computed


def prepare_is_equal_value() -> None:
    """Import and compile in the worker what the first call needs, before its time starts."""
    logging.disable(logging.CRITICAL)  # the library warns that its own limits are off
    guard_evaluation()
    is_equal_value("$\\frac{1}{2}$", "\\boxed{0.5} is 1/2", 6, True)


def is_equal_value(expected: str, text: str, precision: int, strict: bool, question: str = "") -> bool:
    """Return whether the answer in `text` equals `expected`. Runs in a worker."""
    from math_verify import parse, verify

    gold: list[Any] = []
    for reading in list_readings(expected):
        gold = gold or parse(reading, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the task's answer {expected[:200]!r} is no mathematics that can be read")
    found, box = parse(text, parsing_timeout=None), extract_boxed(text)
    if not found or (box is not None and not has_content(box)):
        return False
    answer = str(found[-1])
    if box is not None and text.count("\\boxed") == 1:
        answer = box
    elif box is None and text.count("$") == 2 and text.startswith("$") and text.endswith("$"):
        answer = text[1:-1]
    return not find_evasion(answer, found[0], expected, question) and bool(
        verify(gold, found, float_rounding=precision, strict=strict, timeout_seconds=None, raise_on_error=False)
    )


def make_reasoning_gym_reward(
    *, answer: str = "answer", part: str = "all", timeout_s: float = 10.0, concurrency: int = 2
) -> BuiltInReward:
    """Give the score, from 0 to 1, of reasoning-gym for `part` of the text; 0 if there is no such part.

    A task brings everything needed under `reasoning_gym` in its data.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        hint = suggest_install("data")
        raise ConfigError("needs reasoning-gym", key="reward_fn", value="reasoning_gym", hint=hint)
    extract, workers = make_extractor(part), RewardWorkerPool(concurrency)

    async def score(text: str, data: Mapping[str, Any]) -> float:
        entry, found = get_expected_answer(data, "reasoning_gym"), extract(text)
        if found is None:
            return 0.0
        task, options, metadata = entry["task"], entry["options"], entry["metadata"]
        args = (task, options, metadata, data.get(answer), found.strip()[-_MAX_CHARACTERS:])
        return await _call_solver(workers, "score_answer", args, timeout_s)

    return BuiltInReward("reasoning_gym", score)


def prepare_score_answer() -> None:
    """Import the library in the worker before the time of the first call starts."""
    import reasoning_gym  # noqa: F401

    guard_evaluation()


def score_answer(task: str, options: dict[str, Any], metadata: str, answer: str | None, text: str) -> float:
    """Return the task's score of `text`. Runs in a worker. `metadata` is a Python literal: JSON has no tuples."""
    entry = {"answer": answer, "metadata": literal_eval(metadata)}
    return score_puzzle(_make_dataset(task, json.dumps(options, sort_keys=True)), task, text, entry)


@lru_cache(maxsize=32)
def _make_dataset(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))
