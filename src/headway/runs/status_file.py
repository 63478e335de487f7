"""The status of a run in its directory: written every few seconds and at the end, read by `headway status`.

A run at work is asked through its control socket. The file serves everybody who cannot ask: another user, another
machine, and all after the run has ended or was killed.
"""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from headway.errors import HeadwayError
from headway.monitor.run_status import RunStatus

STATUS_FILE = "status.json"
WRITE_EVERY_S = 5.0


def write_status(directory: Path, status: RunStatus) -> None:
    """Write the whole status or nothing. A directory that cannot be written keeps the old one."""
    partial = directory / f"{STATUS_FILE}.partial"
    try:
        partial.write_text(json.dumps(stamp_status(status).to_json(), ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(directory / STATUS_FILE)
    except OSError:
        return  # the ledger and the event log report the problem of the disk


def stamp_status(status: RunStatus) -> RunStatus:
    """Return the status with this process, its machine and the time."""
    return replace(status, process=os.getpid(), host=socket.gethostname(), time_s=time.time())


def read_status(directory: Path) -> RunStatus:
    """Return the last known status of a run. Raise `HeadwayError` if there is none."""
    try:
        return RunStatus.from_json(json.loads((directory / STATUS_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise HeadwayError(f"{directory}: no run has written its status there") from error
    except (OSError, ValueError) as error:
        raise HeadwayError(f"{directory / STATUS_FILE}: cannot be read: {error}") from error
