"""The command line: `headway train`, `scale`, `eval`, `play`, `serve`, `report`, `config`, `simulate`, `plan`,
`pretrain` and `cluster`. The module `<name>_command` implements the command `<name>`; its docstring is the help text.

Exit codes: 0 done, 1 the run ended before its last step, 2 the input is wrong (said on standard error, without a
traceback), 130 interrupted. A traceback means a bug in Headway.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from headway.cli import (
    cluster_command,
    config_command,
    eval_command,
    plan_command,
    play_command,
    pretrain_command,
    report_command,
    scale_command,
    serve_command,
    simulate_command,
    train_command,
)
from headway.errors import HeadwayError
from headway.version import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(100_000, 20, 50)  # collecting among thousands of live tasks costs a fifth of the time
    try:
        code = args.run(args)
        sys.stdout.flush()
        assert isinstance(code, int)
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


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of one command. Overrides `key=value` may stand before and after options."""
    parser = argparse.ArgumentParser(
        prog="headway",
        description="Asynchronous RL post-training: rollout runs ahead of training by a bounded distance.",
        epilog="`headway COMMAND --help` has examples; docs/start.md is where to begin.",
    )
    parser.add_argument("--version", action="version", version=f"headway {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (
        train_command,
        scale_command,
        eval_command,
        play_command,
        serve_command,
        report_command,
        config_command,
        simulate_command,
        plan_command,
        pretrain_command,
        cluster_command,
    ):
        command.add_parser(commands)
        subparser = commands.choices[command.__name__.rpartition(".")[2].removesuffix("_command")]
        subparser.description, subparser.formatter_class = command.__doc__, argparse.RawDescriptionHelpFormatter
    args, rest = parser.parse_known_args(argv)
    unrecognized = [word for word in rest if word.startswith("-") or "=" not in word]
    if unrecognized:
        parser.error(f"unrecognized arguments: {' '.join(unrecognized)}")
    args.arguments += rest
    return args
