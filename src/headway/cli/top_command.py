"""`headway top`: the panel of `headway train` for a run that is at work elsewhere on this machine, or has ended.

    headway top runs/mine
    headway top runs/mine | tee steps.log      one line per step, where there is no terminal

Anybody who can read the directory of the run may look at it. The run is asked for what its stages do, if it belongs to
the same user; else its last status is shown. It ends with the run, or with an interrupt, which the run does not notice.
"""

import argparse
import time
from pathlib import Path

from headway.cli.command_line import make_console
from headway.errors import HeadwayError
from headway.monitor.event_files import last_written_s
from headway.monitor.event_log import LoggedEvent
from headway.monitor.live_display import LiveDisplay, format_step_line
from headway.monitor.log_follower import LogFollower
from headway.monitor.monitor_history import add_past_part
from headway.monitor.run_report import RunMonitor
from headway.monitor.run_status import RunStatus
from headway.runs.run_condition import find_status

HELP = "watch a run that somebody else started"
_TICK_S = 0.5
_STATUS_TIMEOUT_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument("--once", action="store_true", help="show it as it is now, and end")


def run_command(args: argparse.Namespace) -> int:
    """Show the run until it ends. Return 0 if it does its steps or has done them, 1 if it ended early."""
    directory: Path = args.directory
    if not directory.is_dir():
        raise HeadwayError(f"{directory}: there is no such directory")
    status, condition, is_well = _ask(directory)
    monitor, console = RunMonitor(), make_console()
    display = LiveDisplay(monitor, console, steps=status.steps or None)
    display.show(status)
    is_new = False

    def take(event: LoggedEvent) -> None:
        monitor(event)
        if is_new:  # what happened before is history, not news
            display(event)

    follower = LogFollower(directory, on_event=take, on_index=lambda part: add_past_part(monitor, part))
    while follower.advance():
        pass
    if not follower.events:
        raise HeadwayError(f"{directory}: no run has written its log there")
    is_new = True
    if args.once or not condition.startswith("at work"):
        console.print(f"{directory}: {condition}", markup=False, soft_wrap=True)
        console.print(display.panel(monitor.clock.last_s))
        return 0 if is_well else 1
    if not display.is_panel and monitor.throughput.steps:
        console.print(format_step_line(monitor), markup=False, soft_wrap=True)
    with display:
        while condition.startswith("at work"):
            time.sleep(_TICK_S)
            while follower.advance():
                pass
            status, condition, is_well = _ask(directory)
            display.show(status)
            display.tick(monitor.clock.last_s + max(0.0, time.time() - last_written_s(directory)))
    console.print(f"{directory}: {condition}", markup=False, soft_wrap=True)
    return 0 if is_well else 1


def _ask(directory: Path) -> tuple[RunStatus, str, bool]:
    """Return the status of a run, its condition in words, and whether all is well, also where there is no status."""
    try:
        return find_status(directory, timeout_s=_STATUS_TIMEOUT_S)
    except HeadwayError:
        return RunStatus(phase="ended"), "a log without a status", True
