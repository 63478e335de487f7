"""Mathematical equality, and texts that would keep a computer algebra system busy for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.rewards.solver_rewards import make_math_reward
from tests.rewards.factory import judge_all


def test_values_are_compared_not_spellings() -> None:
    pytest.importorskip("math_verify")
    cases = [
        (r"So $x = \frac{1}{2}$, \boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{0.5}", r"\frac12", 1),
        (r"\boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1),
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1),
        ("The answer is 42", "42", 1),
        ("The answer is 42", 42, 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1),
        (r"\boxed{3}", "4", 0),
        ("I do not know", "4", 0),
        ("", "4", 0),
        (r"\boxed{", "4", 0),
        (r"\boxed{\frac{1}{0}}", "4", 0),
        ("\x00 $$$$ {{{{ \\\\\\", "4", 0),
    ]
    verdicts = judge_all(make_math_reward(), [(text, answer) for text, answer, _ in cases])
    assert verdicts == [value for _, _, value in cases]


def test_hostile_texts_end_in_time_and_hold_up_no_other(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    owned = tmp_path / "owned"
    hostile = [
        r"\boxed{9^{9^{9^{9^9}}}}",
        "$" + "(" * 3000 + ")" * 3000 + "$",
        f"__import__('os').system('touch {owned}')",
        f"$__import__('os').system('touch {owned}')$",
    ]
    cases = [*((text, "7") for text in hostile), ("1", ""), ("7", "7")]
    *verdicts, unreadable, fine = judge_all(make_math_reward(timeout_s=0.7, concurrency=1), cases)
    assert fine == 1
    assert "no mathematics" in str(unreadable), "an answer of the task that cannot be read is no verdict"
    for verdict in verdicts:
        assert verdict == 0 or "no verdict" in str(verdict) or "memory" in str(verdict), verdict
    assert not owned.exists()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"math-verify>="):
        make_math_reward()
