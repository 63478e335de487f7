"""Programs that a model wrote, run against tests in the sandbox.

There are three kinds of tests. All are judged outside the process of the program, which never sees the answer:

* functions: `{"call": "add(1, 2)", "expected": 3}`, or the text `assert add(1, 2) == 3`, which means the same;
* other asserts: the program's values go to another process, where the assert is evaluated without the program;
* whole programs: `{"input": "1 2", "output": "3"}`, stdin and stdout.

A program that fails, loops or exceeds a limit has failed its tests and scores zero. There is no score only if the
sandbox itself cannot run it.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from math import isclose
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.rewards.assert_checks import count_held, is_plain_check
from headway.rewards.assert_splitter import AssertTest, CallTest, split_assert, split_call
from headway.rewards.base import get_expected_answer
from headway.rewards.reward_worker_pool import RewardLimitReached, RewardWorkerPool
from headway.rewards.sandbox_fusion_client import SandboxFusionClient
from headway.rewards.scoring_functions import BuiltInReward
from headway.sandbox import ProgramEnding, Sandbox, SandboxBroken, SandboxLimits, SandboxRefused
from headway.sandbox.probe import find_quick_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTest:
    """The input of the whole program, and the output it should print."""

    stdin: str
    stdout: str


ProgramTest = CallTest | AssertTest | StreamTest
_CHECKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRunner:
    """Where one reward runs programs, and checks their values."""

    sandbox: Sandbox | SandboxFusionClient
    limits: SandboxLimits
    workers: RewardWorkerPool


def make_code_reward(
    *,
    tests: str = "tests",
    partial: bool = False,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    most_tests: int = 0,
    concurrency: int | None = None,
    packages: Sequence[str] = (),
    sandbox_url: str | None = None,
    sandbox: Sandbox | SandboxFusionClient | None = None,
) -> BuiltInReward:
    """Score 1 if the last fenced program of the text passes all `tests` of its task, else 0.

    `partial`: score the share of tests passed. `most_tests`: use only so many, evenly chosen; 0 for all. `timeout_s`:
    for all functions together, and for each whole program. `packages`: folders that programs may import from.
    `sandbox_url`: a Sandbox Fusion server that runs programs instead of this machine.
    """
    if sandbox_url is not None:
        sandbox = SandboxFusionClient(sandbox_url, concurrency=concurrency or 64)
    problem = "" if sandbox else find_quick_problem()
    if problem:
        raise ConfigError(problem, key="reward_fn", value="code")
    limits = SandboxLimits(wall_s=timeout_s, cpu_s=max(int(timeout_s) + 1, 1), memory_mb=memory_mb, output_kb=1024)
    sandbox = sandbox or Sandbox(concurrency=concurrency, packages=packages)
    runner = CodeRunner(sandbox=sandbox, limits=limits, workers=RewardWorkerPool(_CHECKERS))

    async def score(text: str, data: Mapping[str, Any]) -> float:
        listed = _list_tests(get_expected_answer(data, tests))
        chosen = choose_tests([parse_test(one) for one in listed], most_tests)
        program = extract_program(text)
        if not program.strip():
            return 0.0
        try:
            passed = await _count_passed(runner, program, chosen, partial)
        except (SandboxRefused, SandboxBroken) as error:
            raise RewardError(f"code: {error}") from error
        return passed / len(chosen) if partial else float(passed == len(chosen))

    return BuiltInReward("code", score)


def extract_program(text: str) -> str:
    """Return the last fenced block, of Python if there is any; a text without fences is a program itself."""
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    block: list[str] = []
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if not stripped.startswith("```"):
            block.append(line)
        elif language is None:
            language, block = stripped[3:].strip().split(" ")[0].lower(), []
        else:
            blocks.append((language, "".join(block)))
            language = None
    python = [block for language, block in blocks if language in ("python", "py", "python3")]
    if blocks:
        return (python or [block for _, block in blocks])[-1]
    return text if language is None else "".join(block)


def parse_test(test: Any) -> ProgramTest:
    """Parse one test of a task. Raises `RewardError` if it is not a test."""
    if isinstance(test, str):
        return split_assert(test)
    if isinstance(test, Mapping) and "call" in test and "expected" in test:
        return split_call(str(test.get("setup", "")), str(test["call"]), test["expected"])
    if isinstance(test, Mapping) and "input" in test and "output" in test:
        return StreamTest(stdin=_join_lines(test["input"]), stdout=_join_lines(test["output"]))
    raise RewardError(f"{str(test)[:200]!r} is no test: give call and expected, input and output, or an assert")


def choose_tests(tests: list[ProgramTest], most: int) -> list[ProgramTest]:
    """Return at most `most` tests, evenly over the list."""
    if not most or len(tests) <= most:
        return tests
    return [tests[number * len(tests) // most] for number in range(most)]


async def _count_passed(runner: CodeRunner, program: str, tests: Sequence[ProgramTest], partial: bool) -> int:
    """Count the tests passed; unless `partial`, return 0 after the first failure."""
    calls = [test for test in tests if not isinstance(test, StreamTest)]
    streams = [test for test in tests if isinstance(test, StreamTest)]
    passed = await _run_calls(runner, program, calls) if calls else 0
    if passed < len(calls) and not partial:
        return 0
    if partial:
        return passed + sum(await asyncio.gather(*(_run_stream(runner, program, test) for test in streams)))
    for test in streams:  # one after the other: the first failure decides
        if not await _run_stream(runner, program, test):
            return 0
        passed += 1
    return passed


async def _run_calls(runner: CodeRunner, program: str, tests: Sequence[CallTest | AssertTest]) -> int:
    """Run all function tests in one process; return how many passed before it ended or exceeded a limit."""
    cases = json.dumps([[test.setup, test.expression] for test in tests])
    files = {"solution.py": program}
    outcome = await runner.sandbox.run_python(HARNESS, stdin=cases, files=files, limits=runner.limits)
    values = _parse_values(outcome.stdout, len(tests))
    passed, checks = 0, list[tuple[str, Any]]()
    for value, test in zip(values, tests, strict=False):
        if isinstance(test, CallTest):
            passed += is_same_value(value, test.expected)
        else:
            checks.append((test.check, value))
    return passed + (await _run_checks(runner, checks) if checks else 0)


def _parse_values(stdout: str, count: int) -> list[Any]:
    """Return the values of the first tests, up to the first line that is not the value of its test.

    The harness writes one line for each test, and a program that writes there itself can only lose.
    """
    values: list[Any] = []
    for line in stdout.split("\n", count)[:count]:
        try:
            index, value = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            break
        if index != len(values):
            break
        values.append(value)
    return values


async def _run_checks(runner: CodeRunner, checks: Sequence[tuple[str, Any]]) -> int:
    """Evaluate asserts on values in processes without the program; return how many held."""
    plain = [one for one in checks if is_plain_check(one[0])]
    others = [one for one in checks if one not in plain]
    held = 0
    if plain:
        with suppress(RewardLimitReached):  # the values make the check too expensive
            function = f"{count_held.__module__}:{count_held.__name__}"
            held += int(await runner.workers.call(function, plain, timeout_s=runner.limits.wall_s))
    if others:
        outcome = await runner.sandbox.run_python(ASSERT_JUDGE, stdin=json.dumps(others), limits=runner.limits)
        held += int(outcome.stdout) if outcome.ok and outcome.stdout.isdigit() else 0
    return held


async def _run_stream(runner: CodeRunner, program: str, test: StreamTest) -> bool:
    outcome = await runner.sandbox.run_python(program, stdin=test.stdin, limits=runner.limits)
    return outcome.ending is ProgramEnding.EXITED and outcome.ok and is_same_output(outcome.stdout, test.stdout)


def _list_tests(tests: Any) -> list[Any]:
    """Return tests as a list; data sets also have JSON in a text, or `{"inputs": […], "outputs": […]}`."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        name = tests.get("fn_name")
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        tests = [make_call_test(str(name), i, o) if name else {"input": i, "output": o} for i, o in pairs]
    if not isinstance(tests, list | tuple) or not tests:
        raise RewardError(f"the task's tests are no list of tests: {str(tests)[:200]!r}")
    return list(tests)


def make_call_test(function: str, given: Any, wanted: Any) -> dict[str, Any] | str:
    """Return the test of one call: arguments are a list, or JSON values in lines; the result is a value, or JSON.

    Data sets also write a result as a list with the result alone. Raises `RewardError`.
    """
    try:
        values = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
        call = f"{function}({', '.join(map(repr, values))})"
        expected = json.loads(wanted) if isinstance(wanted, str) else wanted
    except (ValueError, TypeError) as error:
        raise RewardError(f"a test of {function} that is no JSON: {error}") from error
    if isinstance(wanted, list) and len(wanted) == 1:
        return f"assert {call} in [{wanted!r}, {wanted[0]!r}]"
    return {"call": call, "expected": expected}


def _join_lines(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


_RELATIVE_TOLERANCE = 1e-6
_ABSOLUTE_TOLERANCE = 1e-12
"""Rounding errors of a result that should be zero; a small result is not zero."""
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def is_same_value(found: Any, wanted: Any) -> bool:
    """Return whether `found`, as the harness writes values, is `wanted`. Lists equal tuples; floats may be near."""
    if isinstance(wanted, bool) or wanted is None or isinstance(wanted, str):
        return type(found) is type(wanted) and bool(found == wanted)
    if isinstance(wanted, int | float | complex):
        return _is_same_number(_parse_number(found), wanted)
    if not isinstance(found, dict) or len(found) != 1:
        return False
    ((kind, content),) = found.items()
    if isinstance(wanted, bytes):
        return bool(kind == "bytes" and content == wanted.hex())
    if not isinstance(content, list):  # a program may write anything to the channel of the harness
        return False
    if isinstance(wanted, list | tuple) and kind in ("list", "tuple"):
        return len(content) == len(wanted) and all(map(is_same_value, content, wanted))
    if isinstance(wanted, set | frozenset) and kind == "set":
        return len(content) == len(wanted) and all(
            any(is_same_value(one, other) for one in content) for other in wanted
        )
    return isinstance(wanted, dict) and kind == "dict" and _is_same_dict(content, wanted)


def _is_same_dict(pairs: list[Any], wanted: dict[Any, Any]) -> bool:
    """Compare dicts. JSON has only texts as keys, so the key `1` of a program equals the `"1"` of a data set."""
    if len(pairs) != len(wanted) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    return all(
        any((is_same_value(k, key) or str(k) == key) and is_same_value(v, value) for k, v in pairs)
        for key, value in wanted.items()
    )


def _parse_number(found: Any) -> int | float | complex | None:
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    try:
        match found:
            case {"float": str(text)}:
                return float(text)
            case {"complex": [str(real), str(imaginary)]}:
                return complex(float(real), float(imaginary))
    except ValueError:
        return None
    return None


def _is_same_number(found: int | float | complex | None, wanted: int | float | complex) -> bool:
    if found is None:
        return False
    if isinstance(found, int) and isinstance(wanted, int):
        return found == wanted
    if found != found or wanted != wanted:
        return found != found and wanted != wanted
    try:
        if isinstance(found, complex) or isinstance(wanted, complex):
            return abs(complex(found) - complex(wanted)) <= _RELATIVE_TOLERANCE * max(abs(complex(wanted)), 1e-6)
        return isclose(found, wanted, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except OverflowError:
        return False


def is_same_output(found: str, wanted: str) -> bool:
    """Compare line by line without trailing white space; numbers that are not whole may differ slightly."""
    found_lines, wanted_lines = ([line.split() for line in text.rstrip().splitlines()] for text in (found, wanted))
    return len(found_lines) == len(wanted_lines) and all(
        len(one) == len(other) and all(map(_is_same_word, one, other))
        for one, other in zip(found_lines, wanted_lines, strict=True)
    )


def _is_same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    if ("." not in other and "e" not in other.lower()) or not _DECIMAL.fullmatch(one) or not _DECIMAL.fullmatch(other):
        return False  # whole numbers must be equal
    try:
        return isclose(float(one), float(other), rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except ValueError:
        return False


HARNESS = files("headway.rewards").joinpath("code_harness.txt").read_text(encoding="utf-8")
"""Program that calls a solution's functions inside the sandbox; its text is sent there.

It evaluates expressions and prints their values. Neither it nor the solution knows the expected values: whatever the
solution does to the interpreter, it can only cheat by guessing right.
"""
ASSERT_JUDGE = files("headway.rewards").joinpath("assert_checks.py").read_text(encoding="utf-8")
"""Program that evaluates asserts on values in a sandbox of its own, without the solution."""
