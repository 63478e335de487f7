"""`headway config check` and `headway config explain`: is this configuration right, and what does it mean?

    headway config check run.yaml async_generation_ratio=2
    headway config explain actor_rollout_ref.hybrid_engine=False trainer.n_gpus_per_node=8 --json

Problems go to standard error, one a line, with exit code 2. Nothing is started and torch is not imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.config import ConfigError, ConfigErrors, ResolvedConfig, load_config
from headway.config.resolved_config import to_plain_value

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

_PIPE_WIDTH = 200
_WHAT = "YAML file (- for standard input; may be left out), then overrides key=value"


def add_parser(subparsers: _SubParsers) -> None:
    """Add `config` with `check` and `explain`."""
    parser = subparsers.add_parser("config", help="check or explain a configuration")
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser(
        "check", help="say what is wrong with the options; model, data and rewards are looked for by train --dry-run"
    )
    check.add_argument("arguments", nargs="*", metavar="FILE|key=value", help=_WHAT)
    check.set_defaults(run=run_check)
    explain = actions.add_parser("explain", help="show every value and where it came from")
    explain.add_argument("arguments", nargs="*", metavar="FILE|key=value", help=_WHAT)
    explain.add_argument("--json", action="store_true", help="for machines")
    explain.set_defaults(run=run_explain)


def split_arguments(arguments: list[str]) -> tuple[str | TextIO | None, list[str]]:
    """The source and the overrides: the first argument is a file unless it reads `key=value`."""
    if not arguments:
        return None, []
    first, *rest = arguments
    if first == "-":
        return sys.stdin, rest
    if "=" not in first or Path(first).is_file():
        return first, rest
    return None, arguments


def run_check(args: argparse.Namespace) -> int:
    """Exit code 0 and a line about the run, or 2 and the problems."""
    resolved = _loaded(args.arguments)
    if resolved is None:
        return 2
    derived = resolved.derived
    print(
        f"ok: {derived.pipeline}, α = {derived.async_generation_ratio:g} (bound {derived.bound}), {derived.slots} slots, "
        f"{derived.groups_per_step} groups × {derived.group_size} = {derived.samples_per_step} samples per step, "
        f"train on {len(derived.devices['actor_train'])} devices, "
        f"generate on {len(derived.devices['actor_infer'])} ({derived.replicas} replicas)"
    )
    for note in resolved.notes:
        print(f"note: {note}")
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """Exit code 0 and every value, or 2 and the problems."""
    resolved = _loaded(args.arguments)
    if resolved is None:
        return 2
    if args.json:
        print(json.dumps(explain_config(resolved), indent=2, ensure_ascii=False))
    else:
        _print_tables(resolved)
    return 0


def explain_config(resolved: ResolvedConfig) -> dict[str, Any]:
    """What `explain` shows, as JSON values."""
    return {
        "derived": dataclasses.asdict(resolved.derived),
        "options": {key: {"value": to_plain_value(value), "from": origin} for key, value, origin in resolved.rows()},
        "notes": list(resolved.notes),
    }


def _loaded(arguments: list[str]) -> ResolvedConfig | None:
    source, overrides = split_arguments(arguments)
    try:
        return load_config(source, overrides)
    except ConfigErrors as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
    except ConfigError as error:
        print(error, file=sys.stderr)
    return None


def _print_tables(resolved: ResolvedConfig) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    derived = Table("derived", "value", title="What follows", title_justify="left")
    for field in dataclasses.fields(resolved.derived):
        value = getattr(resolved.derived, field.name)
        parts = {f"{field.name}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {}
        for name, part in (parts or {field.name: value}).items():
            derived.add_row(Text(name), Text(_shown(part)))
    options = Table(title="Every option", title_justify="left")
    for heading in ("key", "value", "where from"):
        options.add_column(heading, overflow="fold")
    for key, value, origin in resolved.rows():
        options.add_row(Text(key), Text(_shown(value)), Text(origin), style="dim" if origin == "default" else None)
    console.print(derived, options)
    for note in resolved.notes:
        console.print(Text(f"note: {note}"))


def _shown(value: Any) -> str:
    """A value as YAML would have it; runs of devices as a range."""
    if isinstance(value, tuple) and len(value) > 2 and value == tuple(range(value[0], value[-1] + 1)):
        return f"{value[0]}–{value[-1]} ({len(value)})"
    return value if isinstance(value, str) else json.dumps(to_plain_value(value), ensure_ascii=False)
