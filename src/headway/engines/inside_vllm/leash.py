"""Ends a process group when its leader has ended: `python leash.py <lifeline> <group>`.

The leader alone holds the other end of the lifeline, a pipe. Lives in a session of its own, so that whoever kills the
group does not end it first. Runs as a plain script: it must start fast and import nothing of ours.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main(lifeline: int, group: int) -> None:
    """Until nobody holds the other end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(lifeline, 1):
        pass
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
