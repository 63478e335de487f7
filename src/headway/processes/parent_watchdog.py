"""Ties processes to the life of this one. Runs as a script beside them: a killed process cannot tidy up itself.

    parent_watchdog.py group LIFELINE GROUP              kill the process group when the lifeline is closed
    parent_watchdog.py run LIFELINE GRACE_S COMMAND…     run a command, and end it when the lifeline is closed

The lifeline is the reading end of a pipe whose other end only this process holds: the kernel closes it, however this
process ended. A watchdog has a session of its own, so that a signal to the group does not end it first. The file
imports nothing of Headway and little of Python's library, as it runs under `python -IS` and must start fast.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform == "linux"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TRACKER = b"multiprocessing.resource_tracker"
"""Removes the shared memory of killed processes once they are gone, and ends then. It is never killed."""
COMMAND = (sys.executable, "-IS", __file__)
"""Command line that runs this file."""
SIGNAL_BASE = 128
"""A watchdog exits with this plus the signal that ended its command, as a shell does."""
MEMORY_LIMIT_CODE = 97
"""Exit code of a contained child that used more memory than it may."""
PROCESS_LIMIT_CODE = 98
"""Exit code of a contained child that left more processes at work than it may."""
MOST_PROCESSES = 1000
"""Processes that may be below a contained child; more would in time leave the machine without any."""


def die_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process when its parent ends. Returns false if the parent is gone already."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def adopt_orphans(adopt: bool = True) -> None:
    """Adopt processes below this one whose parents end, from now on; or stop adopting them. Linux only."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def list_children() -> list[int]:
    """Return the children of this process, also those that have ended and were not waited for."""
    me, found = str(os.getpid()), []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if entry.read_text().rpartition(")")[2].split()[1] == me:
                found.append(int(entry.parent.name))
    return found


def measure_contained(inner: int) -> tuple[int, int]:
    """Return the bytes of memory of a child and of all processes below it or adopted from it, and how many these are.

    Pages that they share count once. Adopted processes that have ended are forgotten.
    """
    total, count, todo = 0, 0, _list_children_of(inner)
    with suppress(OSError, ValueError, IndexError):
        total = int(Path(f"/proc/{inner}/statm").read_text().split()[1]) * _PAGE_BYTES
    for adopted in _list_children_of(os.getpid()):
        with suppress(ChildProcessError):
            if adopted != inner and not os.waitpid(adopted, os.WNOHANG)[0]:
                todo.append(adopted)
    while todo:
        below = todo.pop()
        todo += _list_children_of(below)
        count += 1
        with suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{below}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total, count


def _list_children_of(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError, ValueError):
            found += map(int, entry.read_text().split())
    return found


def kill_children(spared: Collection[int] = ()) -> dict[int, int]:
    """Kill all children but the `spared` and the resource tracker, and those that are adopted thereby.

    Returns their exit codes.
    """
    codes: dict[int, int] = {}
    while left := [pid for pid in list_children() if pid not in spared and not _is_tracker(pid)]:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes


def tie_process_group_to_parent() -> None:
    """Make sure that every process of our group ends with this one, which leads the group.

    vLLM's processes do not notice when the one that started them is killed. Killed, they leave shared memory behind
    (400 MB), which Python's resource tracker removes: it gets a session of its own, so that it survives the group.
    """
    from multiprocessing import resource_tracker

    _start_beside([*COMMAND, "group", "{pipe}", str(os.getpgid(0))])
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None:
        code = "from multiprocessing.resource_tracker import main; main({pipe})"
        tracker._fd = _start_beside([sys.executable, "-c", code])


def _start_beside(command: list[str]) -> int:
    """Start a command in a session of its own, with the reading end of a pipe. Returns the writing end."""
    theirs, ours = os.pipe()
    try:
        subprocess.Popen(
            [word.replace("{pipe}", str(theirs)) for word in command],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs],
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    return ours


# What follows runs in the watchdog.


def watch_group(lifeline: int, group: int) -> None:
    """Kill a process group when the lifeline is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_end_of(lifeline)
    _signal_group(group, signal.SIGKILL)


def run_command(lifeline: int, grace_s: float, command: list[str]) -> int:
    """Run a command until it ends or the lifeline is closed, and leave no process behind. Returns its exit code.

    When the lifeline is closed, the command's group gets SIGTERM, and after `grace_s` everything is killed. On Linux
    the kernel kills the command with this watchdog, and processes that have left its group are killed too.
    """
    me = os.getpid()
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the lifeline decides
    try:
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: die_with_parent(me)
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127

    def end_with_lifeline() -> None:
        _wait_for_end_of(lifeline)
        if grace_s:
            _signal_group(program.pid, signal.SIGTERM)
            threading.Event().wait(grace_s)
        if _LINUX:
            program.kill()  # the others are killed below, but for the resource tracker
        else:
            _signal_group(program.pid, signal.SIGKILL)

    threading.Thread(target=end_with_lifeline, daemon=True).start()
    if not _LINUX:
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
        _signal_group(program.pid, signal.SIGKILL)  # while no other process can have its number
    code = program.wait()
    if _LINUX:
        kill_children()
    return code if code >= 0 else SIGNAL_BASE - code


def _wait_for_end_of(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    mode, pipe, *rest = sys.argv[1:]
    if mode == "group":
        watch_group(int(pipe), int(rest[0]))
    else:
        sys.exit(run_command(int(pipe), float(rest[0]), rest[1:]))
