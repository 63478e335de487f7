"""`headway init`: write a starter project: data, a reward of your own and a commented configuration.

    headway init sums && cd sums
    headway train run.yaml

It trains a tiny model that is made on the spot, in a minute on two cores. Replace model, data and reward by your own.
"""

import argparse
import json
from importlib import resources
from pathlib import Path

from headway.errors import ConfigError

HELP = "write a starter project"
_STARTER_FILES = {"my_rewards.py": "starter_reward.txt", "run.yaml": "starter_config.yaml"}
"""What the files of a starter project are copied from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", nargs="?", type=Path, default=Path(), metavar="DIR", help="where to (here)")


def run_command(args: argparse.Namespace) -> int:
    """Write the files. Raise `ConfigError` if one of them is there already: nothing is overwritten."""
    rows = ({"prompt": f"{n // 10}+{n % 10}=", "answer": str(n // 10 + n % 10)} for n in range(100))
    data = "".join(f"{json.dumps(row)}\n" for row in rows)
    templates = resources.files("headway.cli")
    copied = {name: templates.joinpath(file).read_text(encoding="utf-8") for name, file in _STARTER_FILES.items()}
    files = {"train.jsonl": data, **copied}
    present = [name for name in files if (args.directory / name).exists()]
    if present:
        hint = "another directory"
        raise ConfigError(f"holds {', '.join(present)} already", key="init", value=str(args.directory), hint=hint)
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (args.directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="init", value=str(args.directory)) from error
    for name in files:
        print(args.directory / name)
    go = "" if args.directory == Path() else f"cd {args.directory} && "
    print(f"next: {go}headway train run.yaml")
    return 0
