"""Stands between a run and a program that it has started: `python -I -S guard.py COMMAND…`.

When standard input is closed, because the run wants so or because it is gone, everything that the program has started
is killed, and so it is when the program itself ends. Needs nothing but Python's library, and starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run a command to its end or to ours; its exit code."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become ours
    try:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    ended = os.pidfd_open(program.pid)
    ready, _, _ = select.select([0, ended], [], [])
    code = program.wait() if ended in ready else -signal.SIGKILL
    _kill_children()
    return code if code >= 0 else 128 - code


def _kill_children() -> None:
    """Until nobody is left: what is killed may have children that are ours from then on."""
    while children := _list_children():
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for pid in children:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue


def _list_children() -> list[int]:
    try:
        return [int(pid) for pid in Path("/proc/self/task", str(os.getpid()), "children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
