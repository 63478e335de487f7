"""`headway cluster check`: what is there, how fast it is, and what a configuration would place where.

    headway cluster check
    headway cluster check examples/arithmetic.yaml --json

Looks at the machine that it runs on, and where the configuration names a Ray cluster, at that. Reads no model and
starts nothing; `headway train … --dry-run` also counts memory by the model's shapes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

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
from headway.cli.train_command import PIPE_WIDTH, load_run_config
from headway.config import ResolvedConfig
from headway.launch.memory_needs import ComponentNeeds, estimate_component_needs
from headway.launch.placement import Placement, count_usable_cores, plan_placement
from headway.version import VERSION

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: _SubParsers) -> None:
    """Add `cluster` with `check`."""
    parser = subparsers.add_parser("cluster", help="look at what there is to run on")
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="devices, packages, bandwidth, and where a configuration's parts would go")
    check.add_argument(
        "arguments", nargs="*", metavar="FILE|RUN|key=value", help="YAML file or run directory, then overrides"
    )
    check.add_argument("--json", action="store_true", help="for machines")
    check.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Look, measure, print. A configuration that cannot be placed here is said, with exit code 2."""
    resolved = load_run_config(args.arguments) if args.arguments else None
    directory = Path() if resolved is None else Path(resolved.config.output_dir)
    facts = collect_inventory(directory)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    if not args.json:
        console.print(_table(facts))
    if resolved is None:
        if args.json:
            print(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    where = plan_placement(resolved)
    parts, notes = estimate_component_needs(resolved, where), _asked(resolved, len(facts["gpus"]), where.device)
    if args.json:
        placed = {
            "placement": where.summary,
            "layout": where.layout.sizes,
            "parts": parts_to_json(parts),
            "notes": notes,
        }
        found = {**facts, **placed, **_nodes(where)}
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return 0
    _explain(parts, where.summary, notes, console)
    return 0


def collect_inventory(directory: Path) -> dict[str, Any]:
    """Everything that can be asked here; `directory` is where a run would write."""
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


def _nodes(where: Placement) -> dict[str, Any]:
    """Machines of a Ray cluster, where there is one."""
    if where.cluster is None:
        return {}
    return {"nodes": [{"name": node.name, **node.resources} for node in where.cluster.nodes()]}


def _asked(resolved: ResolvedConfig, there: int, device: str) -> list[str]:
    """Where the configuration speaks of more than there is; a Ray cluster has been asked itself."""
    derived = resolved.derived
    if resolved.config.cluster.kind == "ray":
        return []
    devices = sorted({one for role in ("actor_train", "actor_infer") for one in derived.devices[role]})
    notes = []
    if device == "cuda" and len(devices) > there:
        notes.append(f"it speaks of {len(devices)} devices, and torch sees {there} here")
    if derived.num_nodes > 1:
        notes.append(f"it speaks of {derived.num_nodes} machines, and this is one of them")
    if device == "cpu" and len(devices) > 1:
        shares = "they tell who shares with whom, and how many ranks a trainer has"
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
