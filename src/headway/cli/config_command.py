"""`headway config check`, `explain` and `convert`: is a configuration right, what does it mean, how is it written here?

    headway config check run.yaml async_generation_ratio=2
    headway config explain actor_rollout_ref.hybrid_engine=False trainer.n_gpus_per_node=8 --json
    headway config check -- python3 -m verl.trainer.main_ppo data.train_files=… actor_rollout_ref.model.path=…

`check` also plans where the parts of the run go, here or with `--gpus N` on another machine, and refuses what would not
fit. Problems go to standard error, one a line, with exit code 2. Nothing is started, and torch is imported only where
there are GPUs.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

from rich.table import Table
from rich.text import Text

from headway.cli.command_line import add_json_option, make_console, print_json, split_arguments
from headway.config import ConfigError, ConfigErrors, ResolvedConfig, load_config
from headway.config.conversion import write_own_shape
from headway.config.resolved_config import to_plain_value
from headway.placement.machine import Machine, find_machine
from headway.placement.placement import plan_on_machine
from headway.placement.plan_table import describe_plan
from headway.placement.server_requirements import check_server_requirements

HELP = "check or explain a configuration"
_USUAL_NODE, _USUAL_CORES = 8, 64
"""GPUs and cores of a node where nothing is said about them."""
_ARGUMENTS_HELP = "YAML file (- for standard input; may be left out), then overrides key=value"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    what = "say what is wrong with the options; model, data and rewards are looked for by train --dry-run"
    check = actions.add_parser("check", help=what)
    check.add_argument("arguments", nargs="*", metavar="FILE|key=value", help=_ARGUMENTS_HELP)
    check.add_argument("--gpus", type=int, metavar="N", help="plan for a machine with N GPUs, not for this one")
    check.add_argument("--gpu-memory", type=float, metavar="GIB", default=80.0, help="memory of each of them (80)")
    explain = actions.add_parser("explain", help="show every value and where it came from")
    explain.add_argument("arguments", nargs="*", metavar="FILE|key=value", help=_ARGUMENTS_HELP)
    add_json_option(explain)
    convert = actions.add_parser("convert", help="write a configuration of another project under our own keys")
    convert.add_argument("arguments", nargs="*", metavar="FILE|key=value", help=_ARGUMENTS_HELP)


def run_command(args: argparse.Namespace) -> int:
    """Run the action. Return 2 and print the problems if the configuration is wrong."""
    resolved = _load(args.arguments)
    if resolved is None:
        return 2
    if args.action == "check":
        return _check_placement(resolved, args)
    if args.action == "convert":
        print(write_own_shape(resolved), end="")
    elif args.json:
        print_json(explain_config(resolved))
    else:
        _print_tables(resolved)
    return 0


def _check_placement(resolved: ResolvedConfig, args: argparse.Namespace) -> int:
    """Plan the run, and print the plan. Return 2 where it would not start."""
    if args.gpus is None and resolved.config.cluster.kind == "ray":
        _print_summary(resolved)
        train, infer = (len(resolved.derived.devices[role]) for role in ("actor_train", "actor_infer"))
        print(f"devices: {train} train, {infer} generate; where on the Ray cluster, says headway cluster check")
        return 0
    try:
        machine = find_machine() if args.gpus is None else _make_machine(resolved, args.gpus, args.gpu_memory)
        lines = describe_plan(resolved, plan_on_machine(resolved, machine))
        if args.gpus is None:
            check_server_requirements(resolved)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    _print_summary(resolved)
    print("\n".join(lines))
    return 0


def _make_machine(resolved: ResolvedConfig, gpus: int, memory_gib: float) -> Machine:
    """Return a machine with these GPUs; more than a node has are nodes of eight, or as large as configured."""
    for key, value in (("--gpus", gpus), ("--gpu-memory", memory_gib)):
        if value <= 0:
            raise ConfigError("must be above 0", key=key, value=value)
    said = resolved.provenance["num_gpus_per_node"]
    size = _USUAL_NODE if said.startswith("derived: ") else max(resolved.derived.num_gpus_per_node, _USUAL_NODE)
    nodes = -(-gpus // size)
    if gpus % nodes:
        raise ConfigError(f"is no whole number of nodes of {size}", key="--gpus", value=gpus)
    return Machine(cores=_USUAL_CORES * nodes, gpus=gpus // nodes, gpu_memory_gib=memory_gib, nodes=nodes)


def _print_summary(resolved: ResolvedConfig) -> None:
    derived = resolved.derived
    print(
        f"ok: {derived.pipeline}, α = {derived.async_generation_ratio:g} (bound {derived.bound}), "
        f"{derived.slots} slots, {derived.groups_per_step} groups × {derived.group_size} = "
        f"{derived.samples_per_step} samples per step"
    )
    for note in resolved.notes:
        print(f"note: {note}")


def explain_config(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return what `explain` shows, as JSON values."""
    return {
        "derived": dataclasses.asdict(resolved.derived),
        "options": {key: {"value": to_plain_value(value), "from": origin} for key, value, origin in resolved.rows()},
        "notes": list(resolved.notes),
    }


def _load(arguments: list[str]) -> ResolvedConfig | None:
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
    console = make_console(200)
    derived = Table("derived", "value", title="What follows", title_justify="left")
    for field in dataclasses.fields(resolved.derived):
        value = getattr(resolved.derived, field.name)
        parts = {f"{field.name}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {}
        for name, part in (parts or {field.name: value}).items():
            derived.add_row(Text(name), Text(_format_value(part)))
    options = Table(title="Every option", title_justify="left")
    for heading in ("key", "value", "where from"):
        options.add_column(heading, overflow="fold")
    for key, value, origin in resolved.rows():
        style = "dim" if origin == "default" else None
        options.add_row(Text(key), Text(_format_value(value)), Text(origin), style=style)
    console.print(derived, options)
    for note in resolved.notes:
        console.print(Text(f"note: {note}"))


def _format_value(value: Any) -> str:
    """Return a value as YAML would have it, and consecutive devices as a range."""
    whole = isinstance(value, tuple) and len(value) > 2 and all(isinstance(item, int) for item in value)
    if whole and value == tuple(range(value[0], value[-1] + 1)):
        return f"{value[0]}–{value[-1]} ({len(value)})"
    return value if isinstance(value, str) else json.dumps(to_plain_value(value), ensure_ascii=False)
