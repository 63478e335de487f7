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
from math import isclose
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.rewards.answer_extraction import get_expected_answer
from headway.rewards.function_reward import AsyncReward
from headway.sandbox import ProgramEnding, Sandbox, SandboxBroken, SandboxLimits, SandboxRefused
from headway.sandbox.probe import find_quick_problem

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


def make_code_reward(
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
    problem = "" if sandbox else find_quick_problem()
    if problem:
        raise ConfigError(problem, key="reward_fn", value="code")
    place = sandbox or Sandbox(concurrency=concurrency, packages=packages)
    limits = SandboxLimits(wall_s=timeout_s, cpu_s=max(int(timeout_s) + 1, 1), memory_mb=memory_mb, output_kb=1024)

    async def judge(text: str, data: Mapping[str, Any]) -> float:
        asked = choose_tests([parse_test(one) for one in _listed(get_expected_answer(data, tests))], most_tests)
        program = extract_program(text)
        if not program.strip():
            return 0.0
        try:
            passed = await _passed(place, program, asked, limits, partial)
        except (SandboxRefused, SandboxBroken) as error:
            raise RewardError(f"code: {error}") from error
        return passed / len(asked) if partial else float(passed == len(asked))

    return AsyncReward("code", judge)


def extract_program(text: str) -> str:
    """The last fenced block, one of Python if there is any; an unfenced text is a program itself."""
    blocks: list[tuple[str, str]] = _FENCE.findall(text)
    python = [block for language, block in blocks if language.lower() in ("python", "py", "python3")]
    if blocks:
        return (python or [block for _, block in blocks])[-1]
    unclosed = _OPEN_FENCE.search(text)
    return unclosed.group(1) if unclosed else text


def parse_test(test: Any) -> CallTest | StreamTest:
    """One test as the task spells it. Raises `RewardError` where it is none."""
    if isinstance(test, str):
        return _read_assert(test)
    if isinstance(test, Mapping) and "call" in test and "expected" in test:
        return CallTest(setup=str(test.get("setup", "")), expression=str(test["call"]), expected=test["expected"])
    if isinstance(test, Mapping) and "input" in test and "output" in test:
        return StreamTest(stdin=_joined(test["input"]), stdout=_joined(test["output"]))
    raise RewardError(f"{str(test)[:200]!r} is no test: give call and expected, input and output, or an assert")


def choose_tests(tests: list[CallTest | StreamTest], most: int) -> list[CallTest | StreamTest]:
    """At most `most` tests, evenly over the list."""
    if not most or len(tests) <= most:
        return tests
    return [tests[place * len(tests) // most] for place in range(most)]


async def _passed(
    sandbox: Sandbox, program: str, tests: Sequence[CallTest | StreamTest], limits: SandboxLimits, partial: bool
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


async def _calls(sandbox: Sandbox, program: str, tests: Sequence[CallTest], limits: SandboxLimits) -> int:
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
    return sum(place in values and is_same_value(values[place], test.expected) for place, test in enumerate(tests))


async def _stream(sandbox: Sandbox, program: str, test: StreamTest, limits: SandboxLimits) -> bool:
    outcome = await sandbox.run_python(program, stdin=test.stdin, limits=limits)
    return outcome.ending is ProgramEnding.EXITED and outcome.ok and is_same_output(outcome.stdout, test.stdout)


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


_RELATIVE = 1e-6


def is_same_value(found: Any, wanted: Any) -> bool:
    """Whether `found`, as the harness writes values, is `wanted`. Lists and tuples are alike, floats are near."""
    if isinstance(wanted, bool) or wanted is None or isinstance(wanted, str):
        return type(found) is type(wanted) and bool(found == wanted)
    if isinstance(wanted, int | float | complex):
        return _same_number(_number(found), wanted)
    if not isinstance(found, dict) or len(found) != 1:
        return False
    ((kind, content),) = found.items()
    if isinstance(wanted, bytes):
        return bool(kind == "bytes" and content == wanted.hex())
    if not isinstance(content, list):  # a program may write to the channel of the harness what it likes
        return False
    if isinstance(wanted, list | tuple) and kind == "list":
        return len(content) == len(wanted) and all(map(is_same_value, content, wanted))
    if isinstance(wanted, set | frozenset) and kind == "set":
        return len(content) == len(wanted) and all(
            any(is_same_value(one, other) for one in content) for other in wanted
        )
    return isinstance(wanted, dict) and kind == "dict" and _same_dict(content, wanted)


def _same_dict(pairs: list[Any], wanted: dict[Any, Any]) -> bool:
    """JSON has only texts as keys: the key `1` of a program is the `"1"` of a data set."""
    if len(pairs) != len(wanted) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    return all(
        any((is_same_value(k, key) or str(k) == key) and is_same_value(v, value) for k, v in pairs)
        for key, value in wanted.items()
    )


def _number(found: Any) -> int | float | complex | None:
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


def _same_number(found: int | float | complex | None, wanted: int | float | complex) -> bool:
    if found is None:
        return False
    if isinstance(found, int) and isinstance(wanted, int):
        return found == wanted
    if isinstance(found, complex) or isinstance(wanted, complex):
        return abs(complex(found) - complex(wanted)) <= _RELATIVE * max(abs(complex(wanted)), 1e-6)
    if found != found or wanted != wanted:
        return found != found and wanted != wanted
    try:
        return isclose(found, wanted, rel_tol=_RELATIVE, abs_tol=1e-9)
    except OverflowError:
        return False


def is_same_output(found: str, wanted: str) -> bool:
    """Line by line without trailing white space; where texts differ, numbers may be near."""
    mine, theirs = _lines(found), _lines(wanted)
    if mine == theirs:
        return True
    if len(mine) != len(theirs):
        return False
    for one, other in zip(mine, theirs, strict=True):
        words, others = one.split(), other.split()
        if len(words) != len(others) or not all(map(_same_word, words, others)):
            return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    if "." not in other and "e" not in other.lower():
        return False  # whole numbers must be the same
    try:
        return isclose(float(one), float(other), rel_tol=_RELATIVE, abs_tol=1e-9)
    except ValueError:
        return False


HARNESS = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def plain(value, depth=0):
    kind = type(value)
    if depth > 50:
        return {"other": "too deep"}
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind in (list, tuple):
        return {"list": [plain(item, depth + 1) for item in value]}
    if kind in (set, frozenset):
        return {"set": [plain(item, depth + 1) for item in value]}
    if kind is dict:
        return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if hasattr(value, "tolist"):
        return plain(value.tolist(), depth + 1)
    if hasattr(value, "__next__"):
        return plain([item for item, _ in zip(value, range(10000))], depth + 1)
    return {"other": kind.__name__}

cases = json.load(sys.stdin)
with open("solution.py", encoding="utf-8") as file:
    source = file.read()
space = {"__name__": "solution"}
exec(compile(source, "solution.py", "exec"), space)
for index, (setup, expression) in enumerate(cases):
    try:
        inner = dict(space)
        exec(setup, inner)
        line = json.dumps([index, plain(eval(expression, inner))])
    except BaseException as error:
        line = json.dumps([index, {"other": type(error).__name__}])
    answers.write(line + "\\n")
    answers.flush()
os._exit(0)
"""
