"""The command line. Each command is a module with `HELP`, `add_arguments` and `run_command`; its docstring is the help.

`EXIT_CODES` is what every command returns. A traceback means a bug in Headway.
"""

import argparse
import errno
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from headway.errors import HeadwayError
from headway.version import VERSION

EXIT_CODES = """exit codes:
  0    done
  1    not all of it: a run ended early (the last line says how to go on), answers have no verdict, a run is not well
  2    the input is wrong, said on standard error; nothing was started
  75   SIGTERM stopped a run with a checkpoint, as a batch system does; the same command goes on
  130  interrupted"""
_NAMES = ["init", "train", "dashboard", "top", "status", "scale", "eval", "play", "serve", "report"]
_NAMES += ["config", "simulate", "plan", "measure", "pretrain", "push", "cluster", "launch", "completion"]
COMMANDS = {name: import_module(f"headway.cli.{name}_command") for name in _NAMES}
"""The modules of all commands, in the order in which `headway --help` lists them."""
_MACHINE_PROBLEMS = {errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_MACHINE_PROBLEMS |= {errno.EMFILE, errno.ENFILE}
"""Errors of files that are no bug of Headway: one line says which file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    gc.set_threshold(100_000, 20, 50)  # collecting among thousands of live tasks costs a fifth of the time
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        code: int = COMMANDS[args.command].run_command(args)
        sys.stdout.flush()
        return code
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Nothing may be written to this stream any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _MACHINE_PROBLEMS:
            raise
        print(f"{str(error.filename or 'headway')[:200]}: {error.strerror}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="headway",
        description="Asynchronous RL post-training: rollout runs ahead of training by a bounded distance.",
        epilog=f"{EXIT_CODES}\n\n`headway COMMAND --help` has examples; docs/start.md is where to begin.",
        formatter_class=layout,
    )
    parser.add_argument("--version", action="version", version=f"headway {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.__doc__, formatter_class=layout)
        command.add_arguments(subparser)
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of one command. Overrides `key=value` may stand before and after options."""
    parser = make_parser()
    launch = next((place for place, word in enumerate(argv) if word == "-m"), 0)
    if launch and "--" not in argv:  # the rest is the command line of another project's trainer
        argv = [*argv[:launch], "--", *argv[launch:]]
    args, rest = parser.parse_known_args(argv)
    rest = [word for word in rest if word != "--"]
    unrecognized = [word for word in rest if word.startswith("-") or "=" not in word]
    if unrecognized:
        parser.error(f"unrecognized arguments: {' '.join(unrecognized)}")
    if rest and "arguments" not in args:
        raise HeadwayError(f"{args.command} takes no overrides: {' '.join(rest)}")
    if rest:
        args.arguments += rest
    return args
