"""Rewards by the names that ROLL gives them, with its options and its columns.

    math_rule        the answer equals `ground_truth` in value
    code_sandbox     the program passes `test_cases`, which are of the kind `case_type`
    crossthinkqa     the letter of the choice is right: loose, soft or strict about `\\boxed{}`; repetition costs
    general_val      the letter of the choice is right
    multiple_choice  the letter of the choice is right and stands in a box

Thinking does not count: only what follows the last `</think>` is judged, and an answer that thinks twice scores as a
wrong one. Repetition and length cost what they cost there.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headway.errors import ConfigError, RewardError
from headway.rewards.base import final_text, get_expected_answer, make_extractor
from headway.rewards.code_reward import make_call_test, make_code_reward, parse_test
from headway.rewards.scoring_functions import BuiltInReward
from headway.rewards.solver_rewards import make_math_reward
from headway.rewards.text_rewards import penalise_repetition
from headway.types import Episode

_END_OF_THINKING = "</think>"
_SOLUTION = "<|begin_of_solution|>"
_TEST_NAME = re.compile(r"test|check$")
_CHOICE_GRADES: Mapping[str, tuple[float, float, float, float]] = {
    "loose": (1.0, 1.0, -1.0, -1.0),
    "soft": (1.0, 0.5, -0.5, -1.0),
    "strict": (1.0, -1.0, -1.0, -1.0),
}
"""Rewards of a choice: right in a box, right without one, wrong in a box, wrong without one."""
_SHORT_ANSWER, _LONG_ANSWER = 100, 400
"""Tokens below which an answer is short, and from which on length costs nothing."""


def remove_thinking(text: str) -> str | None:
    """Return what follows the thinking; `None` if there are several ends of thinking."""
    return None if text.count(_END_OF_THINKING) > 1 else text.rpartition(_END_OF_THINKING)[2].strip()


def make_math_rule_reward(
    *,
    answer: str = "ground_truth",
    question: str = "prompt",
    reward_type: str | None = None,
    timeout_s: float = 5.0,
    concurrency: int = 2,
) -> BuiltInReward:
    """Score as `math` does what follows the thinking; `reward_type: verl_boxed` reads a box in the last line alone."""
    if reward_type not in (None, "verl_boxed"):
        hint = "verl_boxed, or nothing"
        raise ConfigError("is no kind of math_rule", key="reward_type", value=reward_type, hint=hint)
    inner = make_math_reward(answer=answer, question=question, timeout_s=timeout_s, concurrency=concurrency)
    last_line, boxed = make_extractor("last_line"), make_extractor("boxed")

    async def score(text: str, data: Mapping[str, Any]) -> float:
        found = remove_thinking(text)
        if reward_type is not None and found is not None:
            box = boxed(last_line(found) or "")
            found = None if box is None else f"\\boxed{{{box}}}"
        return 0.0 if found is None else (await inner.score_text(found, data)).value

    return BuiltInReward("math_rule", score)


def make_code_sandbox_reward(
    *, timeout_s: float = 20.0, memory_mb: int = 512, concurrency: int | None = None
) -> BuiltInReward:
    """Score as `code` does, with the tests of ROLL's data."""
    inner = make_code_reward(timeout_s=timeout_s, memory_mb=memory_mb, concurrency=concurrency)

    async def score(text: str, data: Mapping[str, Any]) -> float:
        tests = read_test_cases(data)
        program = (remove_thinking(text) or "").rpartition(_SOLUTION)[2]
        return (await inner.score_text(program, {"tests": tests})).value

    return BuiltInReward("code_sandbox", score)


def read_test_cases(data: Mapping[str, Any]) -> list[Any]:
    """Return the tests of a row in the form of `code`. Raises `RewardError` for kinds that cannot be judged safely."""
    kind, cases = data.get("case_type"), get_expected_answer(data, "test_cases")
    cases = json.loads(cases) if isinstance(cases, str) else cases
    cases = cases if isinstance(cases, list) else [cases]
    if not all(isinstance(case, Mapping | str) for case in cases):
        raise RewardError(f"test_cases are no list of tests: {str(cases)[:200]!r}")
    if kind in ("assert", "pytest", "check_based"):
        return _keep_judgeable([test for case in cases for test in _split_tests(case)])
    if kind == "text":
        raise RewardError("tests of the kind `text` run code of the data on the answer, which is not done here")
    function = data.get("test_case_function")
    function = None if function in (None, "", "None") else str(function)
    return [_read_stream_case(case, function) for case in cases]


def _split_tests(case: Mapping[str, Any] | str) -> list[str]:
    """Return each assert of a test as a text of its own, with what stands before it.

    Functions `test_…()` and `check(candidate)` are opened; `candidate` is the function that the task asks for.
    """
    entry = {"assert_code": case} if isinstance(case, str) else case
    code = f"{entry.get('import_prefix', '')}\n{entry.get('assert_code', '')}"
    name = entry.get("entry_point")
    try:
        body = ast.parse(re.sub(r"\bcandidate\b", str(name), code) if name else code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"{code[:200]!r} is no test: {error}") from error
    opened = [one for one in body if isinstance(one, ast.FunctionDef) and _TEST_NAME.match(one.name)]
    before = [one for one in body if one not in opened]
    found = _list_asserts([], before)
    common = [one for one in before if not isinstance(one, ast.Assert)]
    for function in opened:
        found += _list_asserts(common, function.body)
    return found


def _list_asserts(before: Sequence[ast.stmt], body: Sequence[ast.stmt]) -> list[str]:
    """Return the asserts of a block, each behind the other statements that come before it."""
    statements, found = list(before), list[str]()
    for one in body:
        if isinstance(one, ast.Assert):
            found.append("\n".join(map(ast.unparse, (*statements, one))))
        elif not isinstance(one, ast.With):  # such as `with pytest.raises(…)`, which would run beside the program
            statements.append(one)
    return found


def _keep_judgeable(tests: Sequence[str]) -> list[str]:
    """Return the tests that can be judged outside the program. Raises `RewardError` if there are none."""
    kept, reason = [], "it has no assert"
    for test in tests:
        try:
            parse_test(test)
        except RewardError as error:
            reason = str(error)
        else:
            kept.append(test)
    if not kept:
        raise RewardError(f"no test of the task can be judged: {reason}")
    return kept


def _read_stream_case(case: Mapping[str, Any] | str, function: str | None) -> Mapping[str, Any] | str:
    if isinstance(case, str) or not {"stdin", "expected_stdout"} <= case.keys():
        raise RewardError(f"a test without stdin and expected_stdout: {str(case)[:200]!r}")
    given, wanted = case["stdin"], case["expected_stdout"]
    if function is None:
        return {"input": given, "output": wanted}
    return make_call_test(function, str(given), str(wanted))


def make_crossthinkqa_reward(
    *,
    answer: str = "ground_truth",
    reward_type: Literal["loose", "soft", "strict"] = "loose",
    response_length_penalty_coef: float = 0.0,
) -> BuiltInReward:
    """Score 1 for the right choice in a box, down to −1; repetition costs up to 0.5, and a short answer costs too."""
    if reward_type not in _CHOICE_GRADES:
        raise ConfigError("is no grade", key="reward_type", value=reward_type, hint="loose, soft or strict")

    def score(episode: Episode, data: Mapping[str, Any]) -> dict[str, float]:
        text = final_text(episode)
        is_right, is_boxed = judge_choice(text, data, answer)
        grade = _CHOICE_GRADES[reward_type][2 * (not is_right) + (not is_boxed)]
        repeated = penalise_repetition(text, 0.5)
        length = min(max(len(episode.turns[-1].generation.actions), _SHORT_ANSWER), _LONG_ANSWER)
        short = 0.5 * (_LONG_ANSWER - length) / (_LONG_ANSWER - _SHORT_ANSWER)
        value = grade - repeated - response_length_penalty_coef * short
        return {"score": value, "right": float(is_right), "repetition": -repeated}

    return BuiltInReward("crossthinkqa", score, view=lambda episode: episode)


def make_general_val_reward(*, answer: str = "ground_truth") -> BuiltInReward:
    """Score 1 if the letter of the choice is right, in a box or not."""
    return BuiltInReward("general_val", lambda text, data: float(judge_choice(text, data, answer)[0]))


def make_multiple_choice_reward(*, answer: str = "ground_truth") -> BuiltInReward:
    """Score 1 if the letter of the choice is right and stands in a box."""
    return BuiltInReward("multiple_choice", lambda text, data: float(all(judge_choice(text, data, answer))))


def judge_choice(text: str, data: Mapping[str, Any], answer: str) -> tuple[bool, bool]:
    """Return whether the choice is right, and whether it stands in a box.

    The choice is the first capital letter in the last box; without a box, after the last `answer is`, or in the text.
    """
    wanted = str(get_expected_answer(data, answer)).strip()
    found = remove_thinking(text)
    if not wanted or found is None:
        return False, False
    boxes = re.findall(r"\\boxed\{([^{}]+)\}", found)
    start = found.lower().rfind("answer is")
    said = boxes[-1] if boxes else found[start + len("answer is") :] if start >= 0 else found
    letter = next((one for one in said if one.isupper()), "")
    return letter == wanted[0], bool(boxes)
