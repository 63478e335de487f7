"""Attempts to win `math` and `reasoning_gym` without the answer, or by touching what checks it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headway.rewards.base import Reward
from headway.rewards.solver_rewards import make_math_reward, make_reasoning_gym_reward
from headway.sandbox.expression_guard import evaluate_arithmetic
from tests.rewards.factory import episode

Case = tuple[str, str, str]
"""Text, answer of the task, and its prompt."""

MATH: dict[str, Case] = {
    "a list": (r"\boxed{41, 42, 43}", "42", ""),
    "alternatives": (r"\boxed{41 \text{ or } 42}", "42", ""),
    "alternatives inside a text": (r"\boxed{42 \text{ (or maybe 43)}}", "42", ""),
    "alternatives around a text": (r"\boxed{42 \text{ (or maybe } 43)}", "43", ""),
    "a set": (r"\boxed{\{41, 42\}}", "42", ""),
    "several boxes": (r"\boxed{41}, \boxed{42}, \boxed{43}", "42", ""),
    "a tuple": (r"\boxed{(41, 42)}", "42", ""),
    "an interval": (r"\boxed{[41, 43]}", "42", ""),
    "a larger interval": (r"\boxed{(-\infty, \infty)}", "(1,2)", ""),
    "a larger set": (r"\boxed{\{1,2,3,4,5\}}", r"\{1,2\}", ""),
    "an inequality": (r"\boxed{41 \le x \le 43}", "42", ""),
    "plus or minus": (r"\boxed{42 \pm 1}", "42", ""),
    "two lines in a box": (r"\boxed{41\\ 42}", "42", ""),
    "an ellipsis": (r"\boxed{41, \; 42, \ldots}", "42", ""),
    "a space that is not read": (r"\boxed{41 \hspace{1cm} 42}", "42", ""),
    "a tie": (r"\boxed{41 ~ 42}", "42", ""),
    "an ampersand": (r"\boxed{41 \& 42}", "42", ""),
    "an index": (r"\boxed{42_{43}}", "42", ""),
    "a vector": (r"\boxed{\begin{pmatrix}41\\42\end{pmatrix}}", "42", ""),
    "choices": (r"\boxed{A, B, C, D}", "B", ""),
    "a box in a box": (r"\boxed{42 \boxed{43}}", "42", ""),
    "prose beside an empty box": (r"The answer is 42. \boxed{}", "42", ""),
    "prose beside a box that says nothing": (r"The answer is 42. \boxed{?}", "42", ""),
    "arabic digits": (r"\boxed{٤٢}", "42", ""),
    "full-width digits": (r"\boxed{４２}", "42", ""),
    "a superscript": (r"\boxed{4²}", "4", ""),
    "not a number": (r"\boxed{\text{nan}}", "42", ""),
    "complex infinity": (r"\boxed{\frac{1}{0}}", "42", ""),
    "infinity": (r"\boxed{\infty}", "42", ""),
    "a fraction of a percentage": (r"\boxed{0.42}", "42", ""),
    "the base for the power": (r"\boxed{2}", "2^{10}", ""),
    "the first summand for the sum": (r"\boxed{3}", "3+2x", ""),
    "the mantissa for the number": (r"\boxed{1}", "1e5", ""),
    "a product that is not computed": (r"\boxed{17 \times 23}", "391", ""),
    "a sum that is not computed": (r"\boxed{300 + 91}", "391", ""),
    "a quotient that is not computed": (r"\boxed{\frac{782}{2}}", "391", ""),
    "an integral that is not computed": (r"\boxed{\int_0^{42} 1 dx}", "42", ""),
    "a series that is not computed": (r"\boxed{\sum_{k=1}^{3} k}", "6", ""),
    "a plain product that is not computed": ("17*23", "391", ""),
    "the root of the question": (r"\boxed{\sqrt{1764}}", "42", r"What is $\sqrt{1764}$?"),
    "the power of the question": (r"\boxed{2^{10}}", "1024", "Compute 2^10."),
    "the expression to simplify": (r"\boxed{(x+1)^2 - x^2}", "2x+1", "Simplify $(x+1)^2-x^2$."),
    "a huge power": (r"\boxed{9^{9^{9^{9^9}}}}", "42", ""),
    "a huge factorial": (r"\boxed{(10^{10})!}", "42", ""),
    "a tower that is nearly one": (r"\boxed{1.0000001^{10^{12}}}", "42", ""),
}
HONEST: list[Case] = [
    (r"\boxed{42\text{ cm}^2}", "42", ""),
    (r"\boxed{1{,}234}", "1234", ""),
    (r"\boxed{2\frac{1}{2}}", "2.5", ""),
    (r"\boxed{x = 6 \cdot 7 = 42}", "42", "What is 6*7?"),
    (r"\boxed{3\times 10^5}", "300000", ""),
    (r"\boxed{2^{10}}", "1024", "How many subsets has a set of 10?"),
    (r"\boxed{1024}", "2^{10}", ""),
    (r"\boxed{50\%}", "50", ""),
    (r"\boxed{-\frac{3}{4}}", "-0.75", ""),
    (r"\boxed{3/4}", r"\frac{3}{4}", "Which is larger, 3/4 or 2/3?"),
    (r"\boxed{1} and \boxed{2}", "1,2", ""),
    (r"\boxed{3,5}", "3,5", ""),
    (r"\boxed{2x+3}", "3+2x", ""),
    (r"\boxed{9^{9^9}}", "9^{9^9}", ""),
    (r"\boxed{1 + \sqrt{2}}", r"\sqrt{2}+1", ""),
]


def judge(reward: Reward, cases: list[dict[str, Any]], texts: list[str]) -> list[float]:
    async def scene() -> list[float]:
        pairs = zip(texts, cases, strict=True)
        return [one.value for one in await asyncio.gather(*(reward.score(episode(t, data=d)) for t, d in pairs))]

    return asyncio.run(scene())


@pytest.fixture(scope="module")
def math_verdicts() -> dict[str, float]:
    """All verdicts at once, so that one worker imports the library once."""
    pytest.importorskip("math_verify")
    cases = [*MATH.values(), *HONEST]
    data = [{"answer": answer, "prompt": prompt} for _, answer, prompt in cases]
    values = judge(make_math_reward(concurrency=1, timeout_s=4), data, [text for text, _, _ in cases])
    return dict(zip([*MATH, *(text for text, _, _ in HONEST)], values, strict=True))


@pytest.mark.parametrize("attack", MATH)
def test_math_is_not_won_by(attack: str, math_verdicts: dict[str, float]) -> None:
    assert math_verdicts[attack] == 0


@pytest.mark.parametrize("answer", [text for text, _, _ in HONEST])
def test_math_is_still_won_by(answer: str, math_verdicts: dict[str, float]) -> None:
    assert math_verdicts[answer] == 1


MATRIX = {"task": "binary_matrix", "options": {"size": 1, "seed": 1}, "metadata": "{}"}
COUNTDOWN = {
    "task": "countdown",
    "options": {"size": 1, "seed": 1},
    "metadata": "{'numbers': [3, 5, 7], 'target': 4, 'expression': ''}",
}
PATCH = (
    "setattr(__import__('reasoning_gym').algorithmic.binary_matrix.BinaryMatrixDataset, 'score_answer', lambda *a: 1.0)"
)
PUZZLES: dict[str, tuple[dict[str, Any], str]] = {
    "code in eval": (MATRIX, "__import__('os').system('touch OWNED')"),
    "code in parse_expr": (COUNTDOWN, "__import__('os').system('touch OWNED')"),
    "code behind a string": (COUNTDOWN, 'eval(\'__import__("os").system("touch OWNED")\')'),
    "code behind sympify": (COUNTDOWN, 'sympify(\'open("OWNED", "w")\')'),
    "a checker that is patched": (MATRIX, PATCH),
    "attributes": (MATRIX, "().__class__.__base__.__subclasses__()"),
    "a comprehension that never ends": (MATRIX, "[0 for a in range(10**6) for b in range(10**6)]"),
    "a huge list": (MATRIX, "[0] * 10**12"),
    "a huge power": (COUNTDOWN, "9**9**9**9"),
    "constants for numbers": (COUNTDOWN, "(3+5+7)*(E-E)+" + "+".join(["pi/pi"] * 4)),
    "functions for numbers": (COUNTDOWN, "floor(log(3+5+7)) + Abs(cos(pi)) + 1"),
    "digits of another script": (COUNTDOWN, "٣+٥-٧+3"),
}


@pytest.fixture(scope="module")
def puzzle_verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    pytest.importorskip("reasoning_gym")
    owned = tmp_path_factory.mktemp("owned") / "file"
    honest = [(COUNTDOWN, "(5+7)/3"), (MATRIX, "0 1\n1 0"), (MATRIX, "[[0, 1], [1, 0]]")]
    cases = [*PUZZLES.values(), *honest]
    data = [{"answer": "0 1\n1 0", "reasoning_gym": puzzle} for puzzle, _ in cases]
    texts = [text.replace("OWNED", str(owned)) for _, text in cases]
    values = judge(make_reasoning_gym_reward(concurrency=1, timeout_s=4), data, texts)
    verdicts = dict(zip([*PUZZLES, "sum", "matrix", "list"], values, strict=True))
    return {**verdicts, "owned": float(Path(owned).exists())}


@pytest.mark.parametrize("attack", PUZZLES)
def test_reasoning_gym_is_not_won_by(attack: str, puzzle_verdicts: dict[str, float]) -> None:
    assert puzzle_verdicts[attack] <= 0.05, "the library's own consolation"
    assert not puzzle_verdicts["owned"]


def test_reasoning_gym_still_scores_what_it_should(puzzle_verdicts: dict[str, float]) -> None:
    assert (puzzle_verdicts["sum"], puzzle_verdicts["matrix"], puzzle_verdicts["list"]) == (1.0, 1.0, 0.1)


@pytest.mark.parametrize(
    "text", ["9**9**9", "(9**9999)**9999", "1<<10**9", "[1]*9", "'a'*9", "f(1)", "a.b", "lambda: 0"]
)
def test_arithmetic_is_all_that_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match=r"too large|only numbers|is no arithmetic"):
        evaluate_arithmetic(text)
    assert evaluate_arithmetic("[1 + 2, (3 << 2) * 4, 2**10, -0x1f]") == [3, 48, 1024, -31]
