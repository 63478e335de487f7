"""Asserts of data sets, split into the program's part and the judge's part."""

from __future__ import annotations

import pytest

from headway.errors import RewardError
from headway.rewards.assert_splitter import AssertTest, CallTest, split_assert, split_call


@pytest.mark.parametrize(
    ("text", "expression", "check"),
    [
        ("assert f(1) == g(1)", ["f(1)", "g(1)"], "assert _headway_0 == _headway_1"),
        ("assert abs(f(1) - 0.3) < 1e-6", ["f(1)"], "assert abs(_headway_0 - 0.3) < 1e-06"),
        ("assert isinstance(f(1), int)", ["f(1)"], "assert isinstance(_headway_0, int)"),
        ("assert f(1) in (1, 2)", ["f(1)"], "assert _headway_0 in (1, 2)"),
        ("assert (f(1) == 2) == True", ["f(1)"], "assert (_headway_0 == 2) == True"),
        ("assert 3 == f(g(1)).total[0]", ["f(g(1)).total[0]"], "assert 3 == _headway_0"),
        ("assert sum(1, 2) < 4", ["sum(1, 2)"], "assert _headway_0 < 4"),
        ("import math\nassert math.isclose(f(1), 2)", ["f(1)"], "import math\nassert math.isclose(_headway_0, 2)"),
        ("assert math.isclose(f(1), 2)", ["f(1)"], "import math\nassert math.isclose(_headway_0, 2)"),
        ("assert np.allclose(f(1), [2])", ["f(1)"], "import numpy as np\nassert np.allclose(_headway_0, [2])"),
        ("x = [1]\nassert f(x) == sorted(x)", ["f(x)"], "x = [1]\nassert _headway_0 == sorted(x)"),
        (
            "x = [2, 1]\nsort(x)\nassert x == sorted(x)",
            ["x", "x"],
            "x = [2, 1]\nassert _headway_0 == sorted(_headway_1)",
        ),
        ("from solution import f\nassert f(1) != 2", ["f(1)"], "assert _headway_0 != 2"),
        (
            "assert all(f(x) == x * x for x in range(3))",
            ["[f(x) for x in range(3)]"],
            "_headway_0 = iter(_headway_0)\nassert all((next(_headway_0) == x * x for x in range(3)))",
        ),
        (
            "assert f(1) == 1\ns = Stack()\ns.push(2)\nassert s.pop() == 2",
            ["f(1)", "s.pop()"],
            "assert _headway_0 == 1\nassert _headway_1 == 2",
        ),
    ],
)
def test_the_program_computes_and_the_judge_decides(text: str, expression: list[str], check: str) -> None:
    test = split_assert(text)
    assert isinstance(test, AssertTest)
    assigned = [line.partition(" = ") for line in test.setup.splitlines() if line.startswith("_headway_")]
    assert [value for _, _, value in assigned] == expression
    assert test.check == check


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("assert f(1) == [1, (2,)]", CallTest(expression="f(1)", expected=[1, (2,)])),
        ("assert sorted(f(1)) == [1]", CallTest(expression="sorted(f(1))", expected=[1])),
        ("assert not f(1)", CallTest(expression="bool(f(1))", expected=False)),
        ("x = 1\nassert f(x)", CallTest(setup="x = 1", expression="bool(f(x))", expected=True)),
    ],
)
def test_an_assert_that_says_the_value_is_a_call_and_its_value(text: str, expected: CallTest) -> None:
    assert split_assert(text) == expected


def test_a_call_that_compares_is_split_like_an_assert() -> None:
    assert split_call("", "f(1)", 3.5) == CallTest(expression="f(1)", expected=3.5)
    test = split_call("", "f(1) == 2", True)
    assert isinstance(test, AssertTest) and test.check == "assert (_headway_0 == 2) == True"


@pytest.mark.parametrize(
    "text",
    [
        "def check(x):\n    return f(x) == 3\nassert check(1)",
        "ok = f(1) == 3\nassert ok",
        "if f(1) == 3:\n    ok = True\nassert ok",
        "assert (y := f(1)) == g(y)",
        "assert all(x > 1 and f(x) == 2 for x in range(3))",
        "assert (lambda v: f(v) == 1)(2)",
        "assert True",
        "assert f(",
        "f(1)",
    ],
)
def test_a_test_that_the_program_would_decide_is_refused(text: str) -> None:
    with pytest.raises(RewardError, match="is no test"):
        split_assert(text)
