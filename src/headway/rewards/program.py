"""Programs that a model wrote, run against tests in the sandbox.

Two kinds of tests, both judged out here, so that a program never meets the answer it is compared with:

* functions: `{"call": "add(1, 2)", "expected": 3}`, or the text `assert add(1, 2) == 3`, which is read as one;
* whole programs: `{"input": "1 2", "output": "3"}`, stdin and stdout.

A program that fails, loops or is cut off has failed its tests: a score of zero. Only a sandbox that cannot run it
gives no verdict.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.rewards.function import AsyncReward
from headway.rewards.harness import HARNESS
from headway.rewards.text import expected
from headway.rewards.values import same_output, same_value
from headway.sandbox import Ending, Limits, Sandbox, SandboxBroken, SandboxRefused
from headway.sandbox.probe import quick_problem

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_OPEN_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:python|py)?[^\n]*\n(.*)\Z", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """An expression over the program's functions, and its value."""

    setup: str = ""
    expression: str
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTest:
    """What the whole program reads, and what it should print."""

    stdin: str
    stdout: str


def code(
    *,
    tests: str = "tests",
    partial: bool = False,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    most_tests: int = 0,
    concurrency: int | None = None,
    packages: Sequence[str] = (),
    sandbox: Sandbox | None = None,
) -> AsyncReward:
    """1 where the last fenced program of the text passes all `tests` of its task, else 0.

    `partial`: the share of tests passed. `most_tests`: only so many, evenly chosen; 0 for all. `timeout_s`: for all
    functions together, for each whole program alone. `packages`: folders that programs may import from.
    """
    problem = "" if sandbox else quick_problem()
    if problem:
        raise ConfigError(problem, key="reward_fn", value="code")
    place = sandbox or Sandbox(concurrency=concurrency, packages=packages)
    limits = Limits(wall_s=timeout_s, cpu_s=max(int(timeout_s) + 1, 1), memory_mb=memory_mb, output_kb=1024)

    async def judge(text: str, data: Mapping[str, Any]) -> float:
        asked = chosen([read_test(one) for one in _listed(expected(data, tests))], most_tests)
        program = program_in(text)
        if not program.strip():
            return 0.0
        try:
            passed = await _passed(place, program, asked, limits, partial)
        except (SandboxRefused, SandboxBroken) as error:
            raise RewardError(f"code: {error}") from error
        return passed / len(asked) if partial else float(passed == len(asked))

    return AsyncReward("code", judge)


def program_in(text: str) -> str:
    """The last fenced block, one of Python if there is any; an unfenced text is a program itself."""
    blocks: list[tuple[str, str]] = _FENCE.findall(text)
    python = [block for language, block in blocks if language.lower() in ("python", "py", "python3")]
    if blocks:
        return (python or [block for _, block in blocks])[-1]
    unclosed = _OPEN_FENCE.search(text)
    return unclosed.group(1) if unclosed else text


def read_test(test: Any) -> CallTest | StreamTest:
    """One test as the task spells it. Raises `RewardError` where it is none."""
    if isinstance(test, str):
        return _read_assert(test)
    if isinstance(test, Mapping) and "call" in test and "expected" in test:
        return CallTest(setup=str(test.get("setup", "")), expression=str(test["call"]), expected=test["expected"])
    if isinstance(test, Mapping) and "input" in test and "output" in test:
        return StreamTest(stdin=_joined(test["input"]), stdout=_joined(test["output"]))
    raise RewardError(f"{str(test)[:200]!r} is no test: give call and expected, input and output, or an assert")


def chosen(tests: list[CallTest | StreamTest], most: int) -> list[CallTest | StreamTest]:
    """At most `most` tests, evenly over the list."""
    if not most or len(tests) <= most:
        return tests
    return [tests[place * len(tests) // most] for place in range(most)]


async def _passed(
    sandbox: Sandbox, program: str, tests: Sequence[CallTest | StreamTest], limits: Limits, partial: bool
) -> int:
    calls = [test for test in tests if isinstance(test, CallTest)]
    streams = [test for test in tests if isinstance(test, StreamTest)]
    passed = await _calls(sandbox, program, calls, limits) if calls else 0
    if passed < len(calls) and not partial:
        return 0
    if partial:
        return passed + sum(await asyncio.gather(*(_stream(sandbox, program, test, limits) for test in streams)))
    for test in streams:  # one after the other: the first failure settles it
        if not await _stream(sandbox, program, test, limits):
            return 0
        passed += 1
    return passed


async def _calls(sandbox: Sandbox, program: str, tests: Sequence[CallTest], limits: Limits) -> int:
    """All function tests in one process: how many it passed before it ended or was cut off."""
    cases = json.dumps([[test.setup, test.expression] for test in tests])
    outcome = await sandbox.run_python(HARNESS, stdin=cases, files={"solution.py": program}, limits=limits)
    values: dict[int, Any] = {}
    for line in outcome.stdout.splitlines():
        try:
            index, value = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue  # not ours, or cut off
        if isinstance(index, int):
            values.setdefault(index, value)
    return sum(place in values and same_value(values[place], test.expected) for place, test in enumerate(tests))


async def _stream(sandbox: Sandbox, program: str, test: StreamTest, limits: Limits) -> bool:
    outcome = await sandbox.run_python(program, stdin=test.stdin, limits=limits)
    return outcome.ending is Ending.EXITED and outcome.ok and same_output(outcome.stdout, test.stdout)


def _read_assert(text: str) -> CallTest:
    """`assert call == literal` becomes a call and its value; of any other assert the truth must be `True`."""
    try:
        *setup, last = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"{text[:200]!r} is no test: {error}") from error
    if not isinstance(last, ast.Assert):
        raise RewardError(f"{text[:200]!r} is no test: it does not end with an assert")
    before = "\n".join(ast.unparse(line) for line in setup)
    match last.test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            try:
                return CallTest(setup=before, expression=ast.unparse(left), expected=ast.literal_eval(right))
            except ValueError:
                pass
    return CallTest(setup=before, expression=f"bool({ast.unparse(last.test)})", expected=True)


def _listed(tests: Any) -> list[Any]:
    """Tests as a list; data sets also have JSON in a text, or `{"inputs": […], "outputs": […]}`."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        tests = [{"input": i, "output": o} for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
    if not isinstance(tests, list | tuple) or not tests:
        raise RewardError(f"the task's tests are no list of tests: {str(tests)[:200]!r}")
    return list(tests)


def _joined(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)
