"""Processes that were started and not ended: found, and ended.

On Linux a process may take in the orphans below it; then everything that its code has started stays within reach, also
what has left its group or its session. Elsewhere nothing is found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans(wanted: bool = True) -> None:
    """From now on, processes below this one whose parent ends become its own children; or no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def list_children() -> list[int]:
    """Processes whose parent this is, dead ones that nobody has asked about included."""
    me, found = str(os.getpid()), []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if entry.read_text().rpartition(")")[2].split()[1] == me:
                found.append(int(entry.parent.name))
    return found


def kill_children(kept: Collection[int] = ()) -> dict[int, int]:
    """Kill all children but those `kept`, and those that thereby become children; their exit codes."""
    codes: dict[int, int] = {}
    while left := [pid for pid in list_children() if pid not in kept]:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes
