"""`headway cluster check`: what this machine has, how fast it is, and where a configuration would be placed.

    headway cluster check
    headway cluster check examples/arithmetic.yaml --json

Looks at this machine and, if the configuration names one, at the Ray cluster. Reads no model and starts nothing;
`headway train … --dry-run` also counts memory by the model's shapes.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from headway.cli.command_line import add_json_option, add_run_arguments, load_run_config, make_console, print_json
from headway.cli.machine_inventory import (
    format_size,
    get_total_memory,
    list_gpus,
    list_packages,
    measure_bandwidth,
    measure_free_memory,
    measure_free_space,
    parts_to_json,
    print_layout,
)
from headway.config import ResolvedConfig
from headway.launch.memory_needs import ComponentNeeds, estimate_component_needs
from headway.launch.placement import Placement, count_usable_cores, plan_placement
from headway.version import VERSION

HELP = "look at what there is to run on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action `check`."""
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="devices, packages, bandwidth, and where a configuration's parts would go")
    add_run_arguments(check)
    add_json_option(check)


def run_command(args: argparse.Namespace) -> int:
    """Print what is here and where a configuration would be placed. Raise `ConfigError` if it cannot be."""
    resolved = load_run_config(args.arguments) if args.arguments else None
    directory = Path() if resolved is None else Path(resolved.config.output_dir)
    facts = collect_inventory(directory)
    console = make_console()
    if not args.json:
        console.print(_table(facts))
    if resolved is None:
        if args.json:
            print_json(facts)
        return 0
    where = plan_placement(resolved)
    parts, notes = (
        estimate_component_needs(resolved, where),
        _note_missing_devices(resolved, len(facts["gpus"]), where.device),
    )
    if args.json:
        placed = {
            "placement": where.summary,
            "layout": where.layout.sizes,
            "parts": parts_to_json(parts),
            "notes": notes,
        }
        print_json({**facts, **placed, **_list_nodes(where)})
        return 0
    _explain(parts, where.summary, notes, console)
    return 0


def collect_inventory(directory: Path) -> dict[str, Any]:
    """Collect everything about this machine; `directory` is where a run would write."""
    return {
        "headway": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": count_usable_cores(),
        "memory": {"total": get_total_memory(), "free": measure_free_memory().get("host")},
        "gpus": list_gpus(),
        "packages": list_packages(),
        "room": measure_free_space(directory),
        "bytes_per_s": measure_bandwidth(directory),
    }


def _list_nodes(where: Placement) -> dict[str, Any]:
    """Return the nodes of the Ray cluster, if the configuration uses one."""
    if where.cluster is None:
        return {}
    return {"nodes": [{"name": node.name, **node.resources} for node in where.cluster.nodes()]}


def _note_missing_devices(resolved: ResolvedConfig, there: int, device: str) -> list[str]:
    """Return notes where the configuration has more devices than this machine. A Ray cluster was asked itself."""
    derived = resolved.derived
    if resolved.config.cluster.kind == "ray":
        return []
    devices = sorted({device_id for role in ("actor_train", "actor_infer") for device_id in derived.devices[role]})
    notes = []
    if device == "cuda" and len(devices) > there:
        notes.append(f"it names {len(devices)} devices, and torch sees {there} here")
    if derived.num_nodes > 1:
        notes.append(f"it names {derived.num_nodes} machines, and this is one of them")
    if device == "cpu" and len(devices) > 1:
        shares = "they say which roles share, and how many ranks a trainer has"
        notes.append(f"its {len(devices)} devices are shares of one CPU here: {shares}")
    return notes


def _explain(parts: list[ComponentNeeds], text: str, notes: list[str], console: Console) -> None:
    console.print(text, markup=False, soft_wrap=True)
    print_layout(parts, console)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print("What memory they need: headway train … --dry-run", markup=False)


def _table(facts: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="What is here", title_justify="left", show_header=False)
    memory = facts["memory"]
    table.add_row("headway", f"{facts['headway']}, Python {facts['python']}, {facts['system']}")
    table.add_row("CPU cores", str(facts["cores"]))
    if memory["total"]:
        table.add_row("memory", f"{format_size(memory['total'])}, {format_size(memory['free'] or 0)} free")
    for number, gpu in enumerate(facts["gpus"]):
        table.add_row(f"GPU {number}", f"{gpu['name']}, {format_size(gpu['total'])}, {format_size(gpu['free'])} free")
    if not facts["gpus"]:
        table.add_row("GPUs", "none that torch sees")
    for name, found in facts["packages"].items():
        table.add_row(name, found or "not installed")
    for name, free in facts["room"].items():
        table.add_row(name, f"{format_size(free)} free")
    for name, speed in facts["bytes_per_s"].items():
        table.add_row(name, f"{speed / 1e9:.2f} GB/s")
    return table
