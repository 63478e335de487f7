"""Programs that touch the harness instead of solving the task: none of them passes, and honest ones still do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.rewards.code_reward import extract_program, is_same_output, is_same_value, make_code_reward
from tests.rewards.factory import episode
from tests.sandbox.factory import require_sandbox

CALLS = [{"call": "f(1)", "expected": 41}, "assert f(2) == 42"]
ASSERTS = [
    "assert abs(f(1) - 41) < 1e-9",
    "assert f(2) in (42, 142) and f(2) > 41",
    "import math\nassert math.isclose(f(3), 43)",
    "assert (f(4) == 44) == True",
    "assert isinstance(f(5), int) and str(f(5)) == '45'",
]
BOTH = [*CALLS, *ASSERTS]
STREAM = [{"input": "1\n", "output": "41"}]
FLOATS = [{"input": "1\n", "output": "0.5"}]
EQUAL = """
class Equal:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __contains__ = __instancecheck__ = __eq__
    def __hash__(self): return 0
    def __sub__(self, other): return self
    __rsub__ = __abs__ = __neg__ = lambda self, *other: self
    def __float__(self): return 41.0
    def __index__(self): return 41
"""
WRITE_ALL = """
import os
for number in range(3, 40):
    try: os.write(number, TEXT)
    except OSError: pass
def f(x): return None
"""

SECRETS = [
    {"call": "f(1)", "expected": "secret-7193"},
    "assert f(2) == 'secret-7193'",
    "assert f(3) != 'x' and f(3) == 'secret-' + '7193'",
]
FIND = """
import gc, glob, re, sys
found = []
def look(data):
    found.extend(re.findall(rb"secret" + rb"-[0-9]{4}", data))
def f(x): return found[0].decode() if found else None
"""
READ_MEMORY = """
with open("/proc/self/mem", "rb") as memory:
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        try:
            memory.seek(start)
            look(memory.read(min(end - start, 1 << 24)))
        except (OSError, ValueError, OverflowError):
            pass
"""
READ_OBJECTS = """
frame = sys._getframe()
while frame:
    look(repr(frame.f_globals).encode(errors="replace") + repr(frame.f_locals).encode(errors="replace"))
    frame = frame.f_back
for one in gc.get_objects():
    if isinstance(one, (dict, list, tuple)):
        look(repr([item for item in list(one) if isinstance(item, str)]).encode(errors="replace"))
"""
READ_FILES = """
look(sys.stdin.buffer.read())
for pattern in ("/tmp/**", "/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ", "/proc/[0-9]*/fd/*", "/dev/shm/**"):
    for path in glob.glob(pattern, recursive=True):
        try:
            if "/fd/" not in path or path.rpartition("/")[2] > "2":
                look(open(path, "rb").read(1 << 20))
        except OSError:
            pass
"""

ATTACKS: dict[str, tuple[str, Any]] = {
    "an object that equals everything": (EQUAL + "def f(x): return Equal()", BOTH),
    "an object that equals everything, in asserts alone": (EQUAL + "def f(x): return Equal()", ASSERTS[:1]),
    "an object that is in every tuple": (EQUAL + "def f(x): return Equal()", ASSERTS[1:2]),
    "an object behind a comparison with True": (EQUAL + "def f(x): return Equal()", ASSERTS[3:4]),
    "a comparison as a call": (
        EQUAL + "def f(x): return Equal()",
        [{"call": "f(1) == 41", "expected": True}],
    ),
    "a number with its own comparison": (
        "class N(float):\n def __eq__(s, o): return True\n __lt__ = __gt__ = __eq__\ndef f(x): return N(7)",
        ASSERTS[:1],
    ),
    "a text with its own comparison": (
        "class T(str):\n def __eq__(s, o): return True\n __hash__ = str.__hash__\ndef f(x): return T('no')",
        [{"call": "f(1)", "expected": "yes"}],
    ),
    "a list with its own iteration": (
        "class L(list):\n def __iter__(s): return iter([41])\n def __eq__(s, o): return True\ndef f(x): return L()",
        [{"call": "f(1)", "expected": [41]}],
    ),
    "another isclose": ("import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0", ASSERTS[2:3]),
    "a math of its own": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
        ["assert math.isclose(f(1), 41)"],
    ),
    "another abs and other builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.bool = lambda x: True\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.str = lambda x: '45'\ndef f(x): return 0",
        ASSERTS,
    ),
    "another eval": ("import builtins\nbuiltins.eval = lambda *a: True\ndef f(x): return 0", BOTH),
    "asserts that are switched off": ("import sys, builtins\nbuiltins.__debug__ = False\ndef f(x): return 0", ASSERTS),
    "another AssertionError": ("import builtins\nbuiltins.AssertionError = int\ndef f(x): return 0", ASSERTS),
    "leaving at the import": ("import os\nos._exit(0)", BOTH),
    "leaving by SystemExit": ("raise SystemExit(0)", BOTH),
    "leaving in the function": ("import os\ndef f(x): os._exit(0)", BOTH),
    "leaving at the end": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit", BOTH),
    "verdicts on every descriptor": (WRITE_ALL.replace("TEXT", "b'[0, true]\\n[1, true]\\n[2, true]\\n'"), BOTH),
    "words of the judge on every descriptor": (WRITE_ALL.replace("TEXT", "b'held\\nheld\\nheld\\n'"), ASSERTS),
    "values of the harness on every descriptor": (
        WRITE_ALL.replace("TEXT", 'b\'[0, {"list": [true]}]\\n[1, {"list": [true]}]\\n\''),
        ASSERTS,
    ),
    "another json": (
        'import json\njson.dumps = lambda *a: \'[0, {"list": [{"float": "nan"}]}]\'\ndef f(x): return 0',
        BOTH,
    ),
    "another print and stdout": (
        "import sys, builtins\nbuiltins.print = lambda *a: None\nsys.stdout = sys.stderr\ndef f(x): return 'held'",
        BOTH,
    ),
    "the functions of the harness": (
        "import sys\nmain = sys.modules['__main__']\nmain.plain = lambda value, depth=0: True\ndef f(x): return 0",
        BOTH,
    ),
    "the cases in the frames": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for case in frame.f_globals.get('cases', ()):\n        case[1] = '41'\n    frame = frame.f_back\n"
        "def f(x): return 0",
        BOTH,
    ),
    "the expected values in memory": (FIND + READ_MEMORY, SECRETS),
    "the expected values in frames and objects": (FIND + READ_OBJECTS, SECRETS),
    "the expected values in files and input": (FIND + READ_FILES, SECRETS),
    "a thread that answers later": (
        "import os, threading, time\ndef answer():\n    time.sleep(0.3)\n    os.write(1, b'[0, 41]\\n[1, 42]\\n')\n"
        "threading.Thread(target=answer).start()\ndef f(x): return 0",
        BOTH,
    ),
    "a child that answers instead": (
        "import os\nif os.fork(): os._exit(0)\ndef f(x): return True",
        BOTH,
    ),
    "files for the judge": (
        "for name in ('json', 'os', 'sys', 'main', 'sitecustomize', 'usercustomize'):\n"
        "    open(f'/tmp/{name}.py', 'w').write('print(\"held\\\\n\" * 5)')\ndef f(x): return 0",
        ASSERTS,
    ),
    "another main program": ("open('/tmp/main.py', 'w').write('print([0, 41])')\ndef f(x): return 0", BOTH),
    "signals to everybody": (
        "import os, signal\nfor pid in (1, os.getppid(), -1):\n    for number in (9, 15, 19):\n"
        "        try: os.kill(pid, number)\n        except OSError: pass\ndef f(x): return True",
        BOTH,
    ),
    "a debugger on the first process": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor request in (16, 0x4206):\n    libc.ptrace(request, 1, 0, 0)\n"
        "def f(x): return True",
        BOTH,
    ),
    "the memory of the first process": (
        "try:\n    with open('/proc/1/mem', 'r+b') as m: m.write(b'x')\nexcept (OSError, ValueError): pass\n"
        "def f(x): return True",
        BOTH,
    ),
    "a trace function in the harness": (
        "import sys\ndef trace(frame, event, arg):\n    frame.f_locals.update(line='[0, true]')\n    return trace\n"
        "sys.settrace(trace)\nsys._getframe(1).f_trace = trace\ndef f(x): return True",
        BOTH,
    ),
    "endless output": ("while True: print('41' * 10000)", BOTH),
    "endless output on the channel": ("import os\nwhile True: os.write(3, b'[0, 41]\\n' * 1000)", BOTH),
    "an endless generator": ("def f(x):\n    while True: yield 41", BOTH),
    "a value without an end": ("def f(x):\n    v = []\n    v.append(v)\n    return v", BOTH),
    "a value of a thousand levels": ("def f(x):\n    v = 41\n    for _ in range(9999): v = [v]\n    return v", BOTH),
    "an object that pickles into a program": (
        "class P:\n    def __reduce__(self): return (eval, ('41',))\ndef f(x): return P()",
        BOTH,
    ),
    "an object with a list of its own": (
        "class A:\n    def tolist(self): return self\ndef f(x): return A()",
        BOTH,
    ),
    "a boolean for a number": ("def f(x): return True", [{"call": "f(1)", "expected": 1}]),
    "zero for a tiny number": ("def f(x): return 0.0", [{"call": "f(1)", "expected": 1.6e-10}]),
    "not a number": ("def f(x): return float('nan')", [*CALLS, *ASSERTS[:2]]),
    "infinity": ("def f(x): return float('inf')", BOTH),
    "nothing": ("", BOTH),
    "only a comment": ("# f(1) == 41", BOTH),
    "the tests themselves": ("assert f(1) == 41\nassert f(2) == 42", BOTH),
    "candidates on stdout": ("print(40, 41, 42)", STREAM),
    "candidates in lines": ("print('40\\n41\\n42')", STREAM),
    "the output on stderr": ("import sys\nprint(41, file=sys.stderr)", STREAM),
    "the right output and a failure": ("print(41)\nraise SystemExit(1)", STREAM),
    "the right output and a crash": ("import os\nprint(41, flush=True)\nos.abort()", STREAM),
    "the right output and no end": ("import time\nprint(41, flush=True)\ntime.sleep(60)", STREAM),
    "digits of another script": ("print('４１')", STREAM),
    "digits of another script for a float": ("print('٠.٥')", FLOATS),
    "not a number on stdout": ("print('nan')", FLOATS),
    "infinity on stdout": ("print('inf')", [{"input": "", "output": "1e999"}]),
    "an underscore in a float": ("print('0.5_0')", FLOATS),
    "a report of the supervisor": ("print('1 - 0 0.0 0.0 2 0\\n41')", STREAM),
    "no output": ("pass", STREAM),
}
HONEST: list[tuple[str, Any]] = [
    ("def f(x): return 40 + x", BOTH),
    (
        "from collections import Counter\ndef f(x): return Counter('aab')",
        [{"call": "f(1)", "expected": {"a": 2, "b": 1}}],
    ),
    (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(1, 2)",
        ["assert f(1) == (1, 2)"],
    ),
    ("def f(x):\n    yield from (1, 2)", [{"call": "f(1)", "expected": [1, 2]}]),
    ("def f(x): x.sort()", ["x = [2, 1]\nf(x)\nassert x == sorted(x)"]),
    ("def f(x): return x * x", ["assert all(f(x) == x * x for x in range(5))"]),
    (
        "class Stack(list):\n    def push(self, x): self.append(x)",
        ["s = Stack()\ns.push(1)\nassert len(s) == 1\ns.push(2)\nassert s.pop() == 2"],
    ),
    ("import re\ndef f(x): return re.match('a', x)", ["assert f('abc')", "assert not f('b')"]),
    ("def f(x): return 0.1 + 0.2 - 0.3", [{"call": "f(1)", "expected": 0}]),
    ("def sum(a, b): return a - b", ["assert sum(3, 1) == 2", "assert sum(3, 1) < 3"]),
    ("print(0.1 + 0.4)", FLOATS),
]


@pytest.fixture(scope="module")
def code_verdicts() -> dict[str, float]:
    """All verdicts side by side: most of the time of a run is waiting."""
    require_sandbox()
    cases = {**ATTACKS, **{f"honest {number}": case for number, case in enumerate(HONEST)}}

    async def scene() -> list[float]:
        reward = make_code_reward(timeout_s=4, memory_mb=256, concurrency=4)
        runs = (reward.score(episode(program, data={"tests": tests})) for program, tests in cases.values())
        return [score.value for score in await asyncio.gather(*runs)]

    return dict(zip(cases, asyncio.run(scene()), strict=True))


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_is_not_won_by(attack: str, code_verdicts: dict[str, float]) -> None:
    assert code_verdicts[attack] == 0


@pytest.mark.parametrize("number", range(len(HONEST)))
def test_code_is_still_won_by_honest_programs(number: int, code_verdicts: dict[str, float]) -> None:
    assert code_verdicts[f"honest {number}"] == 1, HONEST[number]


def test_a_share_of_the_tests_is_not_won_by_verdicts_on_the_channel() -> None:
    require_sandbox()
    reward = make_code_reward(timeout_s=4, partial=True)
    for name in ("verdicts on every descriptor", "words of the judge on every descriptor", "another isclose"):
        program, tests = ATTACKS[name]
        assert asyncio.run(reward.score(episode(program, data={"tests": tests}))).value == 0, name


def test_a_fence_made_to_be_slow_is_not() -> None:
    assert extract_program("```" + "a" * 200_000 + "\n" + "x\n" * 100_000).startswith("x\n")


def test_values_that_only_look_alike_differ() -> None:
    pairs: list[tuple[Any, Any]] = [
        (10**400, 1 + 2j), ({"complex": ["nan", "0.0"]}, 1 + 2j), ({"float": "1e-10"}, 0.0), ({"list": [[1]]}, [[1]]),
        ({"tuple": {"x": 1}}, [1]), ({"dict": [[1, 2], [1, 2]]}, {1: 2}), ({"float": "1"}, True), ("None", None),
    ]  # fmt: skip
    assert not any(is_same_value(found, wanted) for found, wanted in pairs)
    assert not is_same_output("41 ", "4 1") and not is_same_output("0.50001", "0.5")
