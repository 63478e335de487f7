"""`headway scale`: have more or fewer engines in a run that is at work.

    headway scale runs/mine --engines 3

A newcomer serves when it has the newest weights; the requests of one that leaves go on elsewhere with the tokens they
have. The run must be at work on this machine and belong to whoever asks. Exit code 2 where it cannot be.
"""

import argparse
from pathlib import Path

from headway.errors import ConfigError
from headway.processes.control_socket import send_control_request

HELP = "have more or fewer engines in a run that is at work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument("--engines", type=int, required=True, metavar="N", help="how many there shall be")


def run_command(args: argparse.Namespace) -> int:
    """Ask the run for another number of engines, and print which engines come and go."""
    if args.engines < 1:
        raise ConfigError("a run has at least one engine", key="--engines", value=args.engines)
    reply = send_control_request(args.directory, {"engines": args.engines})
    for key, what in (("joined", "joins: it serves when it has the newest weights"), ("left", "leaves")):
        for name in reply[key]:
            print(f"{name} {what}")
    if not reply["joined"] and not reply["left"]:
        print(f"nothing to do: there are {args.engines}")
    return 0
