"""Checks on values: plain ones run in a worker, all others in a sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from headway.rewards.assert_checks import count_held, is_plain_check, restore


@pytest.mark.parametrize(
    "check",
    [
        "assert abs(_headway_0 - 0.3) < 1e-06",
        "import math\nassert math.isclose(_headway_0, math.pi, rel_tol=1e-3)",
        "x = [1]\nassert _headway_0 == sorted(x) and isinstance(_headway_0, (list, tuple))",
        "_headway_0 = iter(_headway_0)\nassert all((next(_headway_0) == x * x for x in range(3)))",
        "assert set(map(str, _headway_0[1:])) <= {'1', '2'}",
    ],
)
def test_computing_is_plain(check: str) -> None:
    assert is_plain_check(check)


@pytest.mark.parametrize(
    "check",
    [
        "assert _headway_0.real",
        "assert ().__class__.__base__.__subclasses__()",
        "import os\nassert os.getpid()",
        "import math as os\nassert os",
        "math = [0]\nassert math.x",
        "import math\nassert math.__loader__",
        "assert open('/tmp/x', 'w')",
        "assert __import__('os')",
        "assert eval('1')",
        "assert getattr(_headway_0, 'x')",
        "assert (lambda: 1)()",
        "assert f'{_headway_0:{1}}'",
        "def f(): return 1\nassert f()",
        "for x in range(3): pass\nassert 1",
        "while True: pass",
        "assert (yield)",
        "assert type(_headway_0)('x', (), {})",
    ],
)
def test_what_could_do_more_is_not_plain(check: str) -> None:
    assert not is_plain_check(check)


def test_checks_are_counted_on_restored_values() -> None:
    values: dict[str, Any] = {"list": [{"tuple": [1, {"float": "0.5"}]}, {"set": ["a"]}, {"dict": [[1, None]]}]}
    assert restore(values) == [(1, 0.5), {"a"}, {1: None}]
    check = "assert _headway_0 == (1, 0.5) and _headway_1 == {'a'} and _headway_2 == {1: None}"
    assert count_held([(check, values), ("assert _headway_0 == 1", values), ("assert _headway_9", values)]) == 1
    hostile: list[Any] = [{"other": "X"}, {"list": 5}, {"list": [[1]]}, {}, None, {"a": 1, "b": 2}, {"float": "x"}]
    assert count_held([("assert True", {"list": [value]}) for value in hostile if value is not None]) == 0
