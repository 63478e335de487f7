"""`headway scale`: have more or fewer engines in a run that is at work.

    headway scale runs/mine --engines 3

A newcomer serves when it has the newest weights; the requests of one that leaves go on elsewhere with the tokens they
have. The run must be at work on this machine and belong to whoever asks. Exit code 2 where it cannot be.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError, HeadwayError
from headway.processes.control_socket import send_control_request

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: _SubParsers) -> None:
    """Add `scale`."""
    parser = subparsers.add_parser("scale", help="have more or fewer engines in a run that is at work")
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument("--engines", type=int, required=True, metavar="N", help="how many there shall be")
    parser.set_defaults(run=run_scale, arguments=[])


def run_scale(args: argparse.Namespace) -> int:
    """Ask, and say what comes of it."""
    if args.arguments:
        raise HeadwayError(f"scale takes no overrides: {' '.join(args.arguments)}")
    if args.engines < 1:
        raise ConfigError("a run has at least one engine", key="--engines", value=args.engines)
    reply = send_control_request(args.directory, {"engines": args.engines})
    for key, what in (("joined", "joins: it serves when it has the newest weights"), ("left", "leaves")):
        for name in reply[key]:
            print(f"{name} {what}")
    if not reply["joined"] and not reply["left"]:
        print(f"nothing to do: there are {args.engines}")
    return 0
