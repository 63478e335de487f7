"""The reward that verl finds by a row's `data_source`, where its user gives no function.

    openai/gsm8k                            the number behind the last `#### ` is the answer
    lighteval/MATH, MATH-500, …             the last box has the answer's value
    math_dapo, math, aime…                  what follows the last `Answer:` has it: 1, else −1
    codecontests, apps, codeforces, taco    the share of the tests that a program passes
    searchR1_…                              the last `<answer>` has the words of an accepted one
    anything else, such as numina_…         the text has the answer's value, as `math` judges

Mathematics is compared by value, where verl compares normalised texts. verl refuses sources that it does not know.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from headway.errors import ConfigError, RewardError
from headway.rewards.base import extract_boxed, get_expected_answer
from headway.rewards.code_reward import make_code_reward
from headway.rewards.scoring_functions import BuiltInReward
from headway.rewards.solver_rewards import make_math_reward
from headway.rewards.text_rewards import make_exact_reward

_BOXED_SOURCES = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_ANSWER_SOURCES = ("math_dapo", "math", "math_dapo_reasoning")
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
_LAST_CHARACTERS = 300
"""An answer stands in so many characters at the end of a text."""
_MARKED_NUMBER, _NUMBER = re.compile(r"#### (-?[0-9.,]+)"), re.compile(r"-?[0-9.,]*[0-9][0-9.,]*")
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def make_data_source_reward(
    *,
    answer: str = "reward_model.ground_truth",
    question: str = "prompt",
    method: Literal["strict", "flexible"] = "strict",
    sandbox_url: str | None = None,
    memory_mb: int = 1024,
    concurrency: int | None = None,
) -> BuiltInReward:
    """Score as verl does for the row's `data_source`. `method: flexible` takes the last number for GSM8K's answer.

    `sandbox_url`, `memory_mb` and `concurrency` are about programs, as in `code`.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError("is no method", key="method", value=method, hint="strict or flexible")
    value = make_math_reward(answer=answer, question=question)
    loose = {"ignore_case": True, "ignore_space": True, "ignore_punctuation": True, "ignore_articles": True}
    words = make_exact_reward(answer="target", part="tag:answer", **loose)
    programs = _make_code_part(answer, sandbox_url, memory_mb, concurrency)

    async def score(text: str, data: Mapping[str, Any]) -> float:
        source, expected = str(data.get("data_source") or ""), get_expected_answer(data, answer)
        if source == "openai/gsm8k":
            return score_gsm8k(text, str(expected), method)
        if source in _ANSWER_SOURCES or source.startswith("aime"):
            lines = _ANSWER_LINE.findall(text[-_LAST_CHARACTERS:])
            return 2 * (await value.score_text(lines[-1], data)).value - 1 if lines else -1.0
        if source in CODE_SOURCES:
            if isinstance(programs, str):
                raise RewardError(f"data_source {source}: {programs}")
            return (await programs.score_text(text, data)).value
        if source.startswith("searchR1_"):
            accepted = expected.get("target", expected) if isinstance(expected, Mapping) else expected
            return (await words.score_text(text, {"target": accepted})).value
        if source in _BOXED_SOURCES:
            box = extract_boxed(text)
            text = "" if box is None else f"\\boxed{{{box}}}"
        return (await value.score_text(text, data)).value

    return BuiltInReward("data_source", score)


def _make_code_part(answer: str, url: str | None, memory_mb: int, concurrency: int | None) -> BuiltInReward | str:
    """Return the reward of programs; where this machine cannot run any, return why."""
    try:
        return make_code_reward(
            tests=answer, partial=True, sandbox_url=url, memory_mb=memory_mb, concurrency=concurrency
        )
    except ConfigError as error:
        if url is not None:
            raise
        return str(error)


def score_gsm8k(text: str, expected: str, method: Literal["strict", "flexible"]) -> float:
    """Score 1 if the number behind the last `#### `, or the last number of all, is the expected one."""
    pattern = _MARKED_NUMBER if method == "strict" else _NUMBER
    found = pattern.findall(text[-_LAST_CHARACTERS:])
    return float(bool(found) and found[-1].replace(",", "").rstrip(".") == expected.replace(",", "").strip())
