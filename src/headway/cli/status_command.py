"""`headway status`: what each stage of a run is doing now, what it waits for and since when.

    headway status runs/mine
    headway status runs/mine --json --timeout 2

A run at work answers itself. Where it cannot be asked (another user or machine, a run that has ended or was killed),
the last status that it wrote to its directory is shown, with its age. Exit codes: 0 the run is at work or has done all
its steps; 1 it ended early, was killed, or does not answer; 2 there is no run.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console

from headway.cli.command_line import add_json_option, make_console, print_json
from headway.errors import HeadwayError
from headway.monitor.report_page import describe_segments
from headway.monitor.report_tables import format_duration
from headway.monitor.run_record import read_run_record
from headway.monitor.run_status import RunStatus, format_engines, format_usage, make_stage_table
from headway.runs.run_condition import WAS_KILLED, find_status, is_gone

HELP = "show what a run is doing, and what it waits for"
_QUIET_S = 60.0
"""Time without progress after which the culprits are named."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for an answer")
    add_json_option(parser)


def run_command(args: argparse.Namespace) -> int:
    """Ask the run, or read what it has written, and print it."""
    if not args.directory.is_dir():
        raise HeadwayError(f"{args.directory}: there is no such directory")
    try:
        status, condition, is_well = find_status(args.directory, timeout_s=args.timeout)
    except HeadwayError as unreadable:
        status, condition, is_well = _read_from_log(args.directory, unreadable)
    if args.json:
        print_json({"condition": condition, **status.to_json()})
    else:
        print_status(args.directory, status, condition, make_console())
    return 0 if is_well else 1


def _read_from_log(directory: Path, unreadable: HeadwayError) -> tuple[RunStatus, str, bool]:
    """Return what the event log says of a run without a readable status. Raise `unreadable` if there is no log."""
    try:
        record = read_run_record(directory)
    except HeadwayError:
        raise unreadable from None
    is_alive = record.is_alive and not is_gone(directory)
    state, words = describe_segments(record.segments, is_alive=is_alive)
    trained = max(record.curves.steps, default=0)
    status = RunStatus(phase="training" if state == "going" else "ended", trained=trained, served=trained)
    return status, f"{words or 'unknown'}, by its event log ({unreadable})", state in ("going", "done")


def print_status(directory: Path, status: RunStatus, condition: str, console: Console) -> None:
    """Print the status of a run."""
    age_s = time.time() - status.time_s
    degraded = "" if status.level == "normal" else f", degraded: {status.level}"
    steps = f" of {status.steps}" if status.steps else ""
    phase = "" if condition.startswith(status.phase) else f"{status.phase}, "
    line = f"{directory}: {condition}; {phase}step {status.trained}{steps}, served {status.served}"
    console.print(f"{line}{degraded}", markup=False, soft_wrap=True)
    if status.finished:
        return
    if condition != "at work" and status.time_s:
        console.print(f"last known state, {format_duration(age_s)} old:", markup=False)
    console.print(make_stage_table(status.stages))
    for engine in format_engines(status.engines):
        console.print(engine, markup=False, soft_wrap=True)
    if status.usage:
        console.print(format_usage(status.usage), markup=False, soft_wrap=True)
    if condition.startswith(WAS_KILLED):
        console.print(f"go on with: headway train {directory} --resume", markup=False, soft_wrap=True)
    if status.phase == "starting" and status.culprits and not status.stages:
        console.print(f"not up yet: {status.culprits[0]}", markup=False, soft_wrap=True)
    elif status.phase != "ended" and (status.quiet_s > _QUIET_S or "does not answer" in condition):
        console.print(f"nothing has moved for {format_duration(status.quiet_s)}", markup=False)
        for culprit in status.culprits:
            console.print(f"  culprit: {culprit}", markup=False, soft_wrap=True)
