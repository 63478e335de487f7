"""Programs against tests: honest ones, wrong ones, and those that try to pass without solving anything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.errors import ConfigError, RewardError
from headway.rewards.code_reward import (
    CallTest,
    StreamTest,
    choose_tests,
    extract_program,
    is_same_output,
    is_same_value,
    make_code_reward,
    parse_test,
)
from headway.sandbox import Sandbox
from tests.rewards.factory import episode, judged
from tests.sandbox.factory import require_sandbox

ADD = [{"call": "add(1, 2)", "expected": 3}, "assert add(-1, 1) == 0", {"call": "add('a', 'b')", "expected": "ab"}]
ECHO = [{"input": "1 2\n", "output": "3"}, {"input": "10 -4\n", "output": "6\n"}]


def verdicts(cases: list[tuple[str, Any]], timeout_s: float = 5, **options: Any) -> list[float]:
    """The code reward's values for (program, tests) pairs, side by side."""
    require_sandbox()

    async def scene() -> list[float]:
        reward = make_code_reward(timeout_s=timeout_s, memory_mb=256, **options)
        found = await asyncio.gather(*(reward.score(episode(text, data={"tests": tests})) for text, tests in cases))
        return [score.value for score in found]

    return asyncio.run(scene())


def test_programs_are_judged_by_their_tests() -> None:
    right = "def add(a, b):\n    return a + b"
    cases: list[tuple[str, Any]] = [
        (f"Here:\n```python\n{right}\n```\nDone.", ADD),
        (right + "\nprint('noise', 1)", ADD),
        ("def add(a, b):\n    return 3", ADD),
        ("def add(a, b):\n    return a +", ADD),
        ("I cannot do this.", ADD),
        ("", ADD),
        ("print(sum(map(int, input().split())))", ECHO),
        ("print(3)", ECHO),
        ("print(sum(map(int, input().split()))); raise SystemExit(1)", ECHO),
        (right, ["import math\nassert math.isclose(add(0.1, 0.2), 0.3)", "assert add([1], [2]) == [1, 2]"]),
    ]
    assert verdicts(cases) == [1, 1, 0, 0, 0, 0, 1, 0, 0, 1]


def test_a_share_of_the_tests_is_a_share_of_the_reward() -> None:
    cases: list[tuple[str, Any]] = [
        ("def add(a, b):\n    return 3", ADD),
        ("print(3)", ECHO),
        ("def add(a, b):\n    if a == -1:\n        while True: pass\n    return a + b", ADD),
    ]
    assert verdicts(cases, timeout_s=2, partial=True) == [pytest.approx(1 / 3), 0.5, pytest.approx(1 / 3)]


def test_tricks_pass_no_test() -> None:
    tests = [{"call": "f(1)", "expected": 41}, "assert f(2) == 42"]
    tricks = [
        "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()",
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import os\nfor i in range(2): os.write(1, b'[%d, true]\\n' % i)\ndef f(x): return None",
        "import inspect\nprint(inspect.currentframe().f_back.f_globals.get('cases'))\ndef f(x): return 0",
        "import json\njson.dumps = lambda value: '[0, {\"list\": 5}]'\ndef f(x): return 0",
        "import gc, os\nfor n in range(3, 30):\n    try: os.write(n, b'[0, {\"dict\": [1]}]\\n[1, {}]\\n[[]]\\n7\\n')\n"
        "    except OSError: pass\ndef f(x): return 0",
        "def f(x):\n    raise KeyboardInterrupt",
        "def f(x):\n    return f(x)",
        "def f(x):\n    return 'x' * (1 << 40)",
        "class Int(int): pass\ndef f(x): return Int(41)",
    ]
    assert verdicts([(trick, tests) for trick in tricks]) == [0] * len(tricks)


@pytest.mark.parametrize("tests", [None, [], "nonsense", [{"x": 1}], "[1]", ["x = 1"], [5], {"inputs": []}])
def test_tests_that_are_none_give_no_verdict(tests: Any) -> None:
    with pytest.raises(RewardError):
        judged(make_code_reward(sandbox=Sandbox()), "pass", tests=tests)


def test_a_machine_without_a_sandbox_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.sandbox.probe.find_bwrap", lambda: (None, "bubblewrap is not installed"))
    with pytest.raises(RewardError, match="refused on this machine: bubblewrap is not installed"):
        judged(make_code_reward(sandbox=Sandbox()), "def add(a, b): return 0", tests=ADD)
    with pytest.raises(ConfigError, match="bubblewrap is not installed"):
        make_code_reward()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```\nx\n```", "x\n"),
        ("```python\na\n```\n```python\nb\n```\n```bash\nc\n```", "b\n"),
        ("```text\nc\n```", "c\n"),
        ("so:\n```py\nx = 1\ny = 2", "x = 1\ny = 2"),
    ],
)
def test_the_program_in_a_text(text: str, program: str) -> None:
    assert extract_program(text) == program


def test_tests_are_read_in_the_ways_data_sets_write_them() -> None:
    assert parse_test("assert f(1) == [1, (2,)]") == CallTest(expression="f(1)", expected=[1, (2,)])
    assert parse_test("assert not f(1), 'why'") == CallTest(expression="bool(f(1))", expected=False)
    assert parse_test("assert f(1) is None") == CallTest(expression="f(1)", expected=None)
    assert parse_test("assert sum(1, 2) == 3") == CallTest(expression="sum(1, 2)", expected=3)
    assert parse_test({"input": ["1", "2"], "output": 3}) == StreamTest(stdin="1\n2", stdout="3")
    assert len(choose_tests([parse_test(one) for one in ADD], 2)) == 2


def test_values_compare_by_meaning() -> None:
    same: list[tuple[Any, Any]] = [
        (3, 3), (3, 3.0), ({"float": "0.30000000000000004"}, 0.3), ({"float": "nan"}, float("nan")), (None, None),
        ({"list": [1, 2]}, (1, 2)), ({"set": [2, 1]}, {1, 2}), ({"dict": [[1, "a"]]}, {"1": "a"}),
        ({"bytes": "ff"}, b"\xff"), ({"complex": ["1.0", "2.0"]}, 1 + 2j), (10**30, 10**30),
    ]  # fmt: skip
    other: list[tuple[Any, Any]] = [
        (True, 1), (1, True), ("1", 1), ({"float": "1.0"}, True), ({"list": [1]}, [1, 2]), ({"list": 5}, [1]),
        ({"dict": [[1]]}, {"a": 1}), ({"other": "X"}, 1), ({"float": "x"}, 1.0), (10**400, 1.5), ({}, []), (None, 0),
        ({"set": [1, 1]}, {1, 2}), (10**30 + 1, 10**30),
    ]  # fmt: skip
    assert all(is_same_value(found, wanted) for found, wanted in same)
    assert not any(is_same_value(found, wanted) for found, wanted in other)
    assert is_same_output("a \nb\n\n", "a\nb") and is_same_output("0.3333333333", "0.333333333")
    assert (
        not is_same_output("a b", "a\nb") and not is_same_output("1000001", "1000000") and not is_same_output("", "a")
    )
