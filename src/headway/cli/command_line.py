"""Parts that commands share: how arguments name a configuration, and how results are printed."""

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console

from headway.config import ResolvedConfig, load_config
from headway.config.document import Source, is_existing_file
from headway.config.launch_arguments import begins_launch
from headway.errors import ConfigError
from headway.runs.run_changes import CONFIG_FILE
from headway.runs.run_directory import find_checkpoint_of_run, read_stored_options

_QUIET_S = 10.0
"""Longest silence of a command that prepares something."""


class ProgressLines:
    """Says on standard error what is being done, and again every ten seconds while that takes long."""

    def __init__(self, what: str) -> None:
        self._what, self._begin_s = what, time.monotonic()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        print(self._what, file=sys.stderr)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_done.set()
        self._thread.join()

    def say(self, what: str) -> None:
        """Note what is done from now on."""
        self._what = what

    def _repeat(self) -> None:
        while not self._is_done.wait(_QUIET_S):
            print(f"still {self._what}, {time.monotonic() - self._begin_s:.0f} s so far", file=sys.stderr)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments that `load_run_config` reads."""
    what = "YAML file or run directory, then overrides"
    parser.add_argument("arguments", nargs="*", metavar="FILE|RUN|key=value", help=what)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def split_arguments(arguments: Sequence[str]) -> tuple[str | TextIO | None, list[str]]:
    """Return the source and the overrides. The first argument is a file unless it reads `key=value`.

    The command line of another project's trainer has no file of ours.
    """
    if not arguments:
        return None, []
    if begins_launch(arguments[0]):
        return None, list(arguments)
    first, *rest = arguments
    if first == "-":
        return sys.stdin, rest
    if "=" not in first or is_existing_file(Path(first)):
        return first, rest
    return None, list(arguments)


def load_run_config(arguments: Sequence[str]) -> ResolvedConfig:
    """Load the configuration that a command line names: a file, or the directory of an earlier run."""
    return resolve_source(*split_arguments(arguments))


def resolve_source(source: Source, overrides: Sequence[str]) -> ResolvedConfig:
    """Load a configuration from a file, a mapping or the directory of an earlier run."""
    if not isinstance(source, str) or not Path(source).is_dir():
        return load_config(source, overrides)
    saved = Path(source) / CONFIG_FILE
    if not saved.is_file():
        hint = "a YAML file, or the directory of a run"
        raise ConfigError(f"{source} is a directory without {CONFIG_FILE}", hint=hint)
    # A run has written down which model each role took from `pretrain`; another `pretrain` is another policy.
    models = [word.partition("=")[2] for word in overrides if word.startswith("pretrain=")]
    roles = ("actor_train", "actor_infer", "reference")
    policy = [f"{role}.model_args.model_name_or_path={model}" for model in models for role in roles]
    where = [f"output_dir={Path(source).absolute()}"]
    stored = read_stored_options(Path(source))
    return load_config(stored or str(saved), [*overrides, *policy, *where])


def make_policy_override(source: str, model: str | None = None) -> list[str]:
    """Return the override that selects `model`, or the newest checkpoint where `source` is a run directory."""
    policy = model or (find_checkpoint_of_run(Path(source), print_warning) if Path(source).is_dir() else None)
    return [] if policy is None else [f"pretrain={policy}"]


def print_warning(line: str) -> None:
    """Print a line on standard error, where it does not mix with results."""
    print(line, file=sys.stderr)


def make_console(pipe_width: int = 160) -> Console:
    """Make a console that is as wide as the terminal, or `pipe_width` columns where there is none."""
    return Console(width=None if sys.stdout.isatty() else pipe_width, highlight=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
