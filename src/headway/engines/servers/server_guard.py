"""Keeps a server that we have started from outliving us: `python guard.py <lifeline> <grace> command…`.

It starts the command in a session of its own and holds the reading end of a pipe whose other end only our process has.
When that closes, however we ended, it ends the whole process group of the server: politely, then by force. When the
server ends first, what is left of its group is killed and the guard ends with the server's exit code. On Linux the
kernel ends the server with the guard, and one kind of process is spared: the one that takes away the shared memory of
the others, once they are gone, and ends then. Runs as a plain script: it must start fast and import nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SPARED = b"multiprocessing.resource_tracker"
_ROUNDS = 100
"""Of looking who is left, ten milliseconds each."""


def main(lifeline: int, grace_s: float, command: list[str]) -> int:
    """Until the server has ended."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_guard() -> None:
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the lifeline says when
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_guard)
    threading.Thread(target=watch_lifeline, args=(lifeline, grace_s, server), daemon=True).start()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    kill_group(server.pid)  # its group, while its number is nobody else's
    code = server.wait()
    return code if code >= 0 else 128 - code


def watch_lifeline(lifeline: int, grace_s: float, server: subprocess.Popen[bytes]) -> None:
    """Until nobody holds the other end."""
    while os.read(lifeline, 1):
        pass
    signal_group(server.pid, signal.SIGTERM)
    threading.Event().wait(grace_s)
    kill_group(server.pid)


def signal_group(group: int, number: signal.Signals) -> None:
    """A signal to everybody who is left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def kill_group(group: int) -> None:
    """Everybody but those who tidy up after the others; really everybody where that cannot be told."""
    for _ in range(_ROUNDS if sys.platform == "linux" else 0):
        left = list_group_members(group)
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        threading.Event().wait(0.01)
    signal_group(group, signal.SIGKILL)


def list_group_members(group: int) -> list[int]:
    """Processes of a group that run and are not spared."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, theirs = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            spared = _SPARED in (entry / "cmdline").read_bytes()
            if int(theirs) == group and state not in b"ZX" and not spared:
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
