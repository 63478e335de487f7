"""The condition of a run as seen from outside: what it answers, or what its last status and its process tell.

A run at work is asked through its control socket. It also writes its status into its directory, every few seconds and
at the end. That file serves everybody who cannot ask: another user, another machine, and all after the run has ended
or was killed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from headway.errors import HeadwayError
from headway.monitor.report_tables import format_duration
from headway.monitor.run_status import RunStatus
from headway.processes.control_socket import CONTROL_SOCKET, send_control_request

STATUS_FILE = "status.json"
WRITE_EVERY_S = 5.0
WAS_KILLED = "was killed, or its machine went down"
"""What the condition of a run begins with if its process is gone and it has not ended."""
_SILENT_S = 4 * WRITE_EVERY_S
"""A run that has written its status this recently is at work."""


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


def find_status(directory: Path, *, timeout_s: float) -> tuple[RunStatus, str, bool]:
    """Return the status of a run, its condition in words, and whether all is well.

    A run at work answers itself; of any other run the last status that it wrote is returned. Raises `HeadwayError` if
    there is none.
    """
    try:
        answer = send_control_request(directory, {"status": True}, timeout_s=timeout_s)
        return RunStatus.from_json(answer), "at work", True
    except HeadwayError as unanswered:
        status = read_status(directory)
        return status, *_judge_condition(status, unanswered.__cause__)


def is_gone(directory: Path) -> bool:
    """Return whether the socket of a run is there and nobody listens to it: the run was killed."""
    try:
        send_control_request(directory, {"status": True}, timeout_s=1.0)
    except HeadwayError as error:
        return (directory / CONTROL_SOCKET).exists() and isinstance(error.__cause__, ConnectionRefusedError)
    return False


def _judge_condition(status: RunStatus, problem: BaseException | None) -> tuple[str, bool]:
    """Return in words what became of a run that does not answer, and whether all is well."""
    age_s = max(0.0, time.time() - status.time_s)
    if status.phase == "ended":
        ended = f"ended {format_duration(age_s)} ago"
        how = f"{ended}: all steps are done" if status.finished else f"{ended}, early: {status.reason}"
        return how, bool(status.finished)
    is_here = status.host == socket.gethostname()
    if isinstance(problem, TimeoutError):
        return f"does not answer: process {status.process} is stopped, or something blocks its event loop", False
    if is_here and (isinstance(problem, ConnectionRefusedError) or not _process_exists(status.process)):
        return f"{WAS_KILLED}: process {status.process} is gone", False
    if age_s < _SILENT_S:
        return f"at work on {status.host}", True
    return f"has not been heard of for {format_duration(age_s)} (process {status.process} on {status.host})", False


def _process_exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it belongs to somebody else
    return True
