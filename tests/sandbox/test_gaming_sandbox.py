"""Programs that attack what reports about them: the outcome is always the true one."""

from __future__ import annotations

import pytest

from headway.sandbox import ProgramEnding
from tests.sandbox.factory import run

FAILING: dict[str, str] = {
    "a report printed before a failure": "print('1 - 0 0.0 0.0 2 0\\nok')\nraise SystemExit(3)",
    "a report on every descriptor": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'1 - 0 0.0 0.0 2 0\\nok')\n"
        "    except OSError: pass\nraise SystemExit(3)"
    ),
    "the shell's memory": (
        "import re\nfor line in open('/proc/1/maps'):\n    start = int(line.split('-')[0], 16)\n    try:\n"
        "        with open('/proc/1/mem', 'r+b', 0) as m: m.seek(start); m.write(b'\\x90')\n"
        "    except (OSError, ValueError, OverflowError): pass\nraise SystemExit(3)"
    ),
    "signals to the shell": (
        "import os\nfor number in range(1, 32):\n    try: os.kill(1, number)\n"
        "    except OSError: pass\nraise SystemExit(3)"
    ),
    "a tracer on the shell": "import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)\nraise SystemExit(3)",
    "a child that ends well": "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nraise SystemExit(3)",
    "a clean exit after the failure": "import atexit, os, sys\natexit.register(print, 'ok')\nsys.exit(3)",
}


@pytest.mark.parametrize("attack", FAILING)
def test_a_failure_is_not_hidden_by(attack: str) -> None:
    outcome = run(FAILING[attack])
    assert not outcome.ok and outcome.exit_code in (3, None), outcome


def test_a_daemon_cannot_write_after_the_end() -> None:
    outcome = run(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(0.5)\n    print('late', flush=True)\n"
        "    os._exit(0)\nprint('done', flush=True)"
    )
    assert outcome.ok and outcome.stdout == "done\n"


def test_what_looks_like_a_report_is_output() -> None:
    outcome = run("import sys\nsys.stdout.write('1 - 0 0.0 0.0 99 99\\n')\nsys.stderr.write('0 - 1\\n')")
    assert outcome.ok and outcome.stdout == "1 - 0 0.0 0.0 99 99\n" and outcome.stderr == "0 - 1\n"
    assert outcome.ending is ProgramEnding.EXITED
