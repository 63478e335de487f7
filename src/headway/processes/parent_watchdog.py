"""The processes that vLLM starts from ours: none outlives it, and what they share is taken away after them.

vLLM's processes do not notice when the one that started them is killed. All are of our process group, and a leash in a
session of its own ends the group with us. Killed, they leave shared memory behind, 400 MB of it; Python's resource
tracker takes it away once they are gone, if it is not killed with them: it gets a session of its own, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

_LEASH = Path(__file__).with_name("leash.py")


def tie_process_group_to_parent() -> None:
    """Before vLLM is started, in a process that leads its group. The other ends of both pipes end with us."""
    _beside([sys.executable, "-IS", str(_LEASH), "{pipe}", str(os.getpgid(0))])
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None:
        tracker._fd = _beside([sys.executable, "-c", "from multiprocessing.resource_tracker import main; main({pipe})"])


def _beside(command: list[str]) -> int:
    """Run it in a session of its own, with the reading end of a pipe; the writing one is ours."""
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
