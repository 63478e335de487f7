"""`headway cluster check`: what this machine has, how fast it is, and where a configuration would be placed.

    headway cluster check
    headway cluster check examples/arithmetic.yaml --json

Looks at this machine and, if the configuration names one, at the Ray cluster. Reads no model and starts nothing;
`headway train … --dry-run` also counts memory by the model's shapes.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import disk_usage
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from headway.cli.command_line import add_json_option, add_run_arguments, load_run_config, make_console, print_json
from headway.config import ResolvedConfig
from headway.monitor.resource_usage import read_meminfo
from headway.placement.memory_model import HOST
from headway.placement.memory_needs import ComponentNeeds, estimate_component_needs, sum_by_memory
from headway.placement.placement import Placement, plan_placement
from headway.placement.plan_table import describe_plan
from headway.placement.required_packages import find_missing_packages
from headway.processes.child_process import count_usable_cores
from headway.version import VERSION

HELP = "look at what there is to run on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        console.print(_make_inventory_table(facts))
    if resolved is None:
        if args.json:
            print_json(facts)
        return 0
    where = plan_placement(resolved)
    parts = estimate_component_needs(resolved, where)
    notes = _note_missing_devices(resolved, len(facts["gpus"]), where.device)
    notes += [str(package.error) for package in find_missing_packages(resolved)]
    if args.json:
        placed = {"placement": where.summary, "layout": where.layout.sizes, "parts": parts_to_json(parts)}
        placed["plan"] = [asdict(place) for place in where.places.values()]
        print_json({**facts, **placed, "notes": notes, **_list_nodes(where)})
        return 0
    console.print(where.summary, markup=False, soft_wrap=True)
    if where.device == "cpu":
        print_layout(parts, console)
    else:
        console.print("\n".join(describe_plan(resolved, where)), markup=False, soft_wrap=True)
        print_memory_fit(parts, console)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print("What memory they need: headway train … --dry-run", markup=False)
    return 0


def collect_inventory(directory: Path) -> dict[str, Any]:
    """Collect everything about this machine; `directory` is where a run would write."""
    return {
        "headway": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": count_usable_cores(),
        "memory": {"total": read_meminfo().get("MemTotal"), "free": measure_free_memory().get("host")},
        "gpus": list_gpus(),
        "packages": {name: _find_version(name) for name in PACKAGES},
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


def _make_inventory_table(facts: dict[str, Any]) -> Table:
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


PACKAGES = ("torch", "transformers", "ray", "vllm", "sglang")
"""Packages that Headway can use."""
_MEMORY_BYTES, _DISK_BYTES, _CHUNK = 128 << 20, 64 << 20, 8 << 20
_SHARED, _CONTROL_GROUP = Path("/dev/shm"), Path("/sys/fs/cgroup")


def measure_free_memory() -> dict[str, int]:
    """Return free bytes by where they are: `host`, `GPU 0`, …"""
    limits = [limit for limit in (read_meminfo().get("MemAvailable"), _measure_cgroup_memory()) if limit is not None]
    found = {"host": min(limits)} if limits else {}
    return found | {f"GPU {number}": gpu["free"] for number, gpu in enumerate(list_gpus())}


def _measure_cgroup_memory() -> int | None:
    """Return what the control group of this process leaves, or `None` where it sets no limit."""
    try:
        paths = (_CONTROL_GROUP / "memory.max", _CONTROL_GROUP / "memory.current")
        most, used = (path.read_text(encoding="ascii").strip() for path in paths)
        return None if most == "max" else max(int(most) - int(used), 0)
    except (OSError, ValueError):
        return None


def list_gpus() -> list[dict[str, Any]]:
    """Return name, memory and free memory of each GPU that torch sees."""
    try:
        import torch
    except ImportError:
        return []
    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        found.append({"name": torch.cuda.get_device_name(number), "total": total, "free": free})
    return found


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def measure_free_space(directory: Path) -> dict[str, int]:
    """Return free bytes on the disk of `directory` and in named shared memory."""
    places = {"disk": _find_existing_parent(directory), "shared memory": _SHARED}
    return {name: disk_usage(path).free for name, path in places.items() if path.is_dir()}


def _find_existing_parent(path: Path) -> Path:
    """Return the nearest directory that exists."""
    path = path.absolute()
    return path if path.is_dir() else _find_existing_parent(path.parent)


def measure_bandwidth(directory: Path) -> dict[str, float]:
    """Measure bytes per second of a copy in memory, and of a file in `directory` written to disk and read back."""
    found = {"memory copy": _memory_bandwidth()}
    try:
        with tempfile.NamedTemporaryFile(dir=_find_existing_parent(directory), prefix=".headway-check-") as file:
            found |= _disk_bandwidth(file)
    except OSError:
        pass  # not writable or full: `measure_free_space` shows it
    return found


def _memory_bandwidth() -> float:
    source = memoryview(bytearray(b"x") * _MEMORY_BYTES)  # zeros would all be the same page
    target = memoryview(bytearray(_MEMORY_BYTES))

    def copy() -> None:
        target[:] = source

    copy()
    return _MEMORY_BYTES / min(_timed(copy) for _ in range(3))


def _disk_bandwidth(file: Any) -> dict[str, float]:
    data, left = os.urandom(_CHUNK), range(0, _DISK_BYTES, _CHUNK)

    def write() -> None:
        for _ in left:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())

    def read() -> None:
        file.seek(0)
        while file.read(_CHUNK):
            pass

    written_s = _timed(write)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {"disk write": _DISK_BYTES / written_s, "disk read": _DISK_BYTES / _timed(read)}


def _timed(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return max(time.perf_counter() - began_s, 1e-9)


def print_layout(parts: Sequence[ComponentNeeds], console: Console) -> None:
    """Print the components, and whether what they need is free."""
    console.print(_make_layout_table(parts))
    print_memory_fit(parts, console)


def print_memory_fit(parts: Sequence[ComponentNeeds], console: Console) -> None:
    """Print for each memory whether what the components need is free."""
    free = measure_free_memory()
    more = "" if any("activations" in part.needs for part in parts) else " and activations"
    for where, size in sum_by_memory(list(parts)).items():
        console.print(_describe_fit(where, size, free.get(where), more), markup=False)


def parts_to_json(parts: Sequence[ComponentNeeds]) -> list[dict[str, object]]:
    return [
        {
            "name": part.name,
            "lives": part.lives,
            "memory": part.memory,
            "threads": part.threads,
            "needs": dict(part.needs),
            **({"rank": {"devices": part.rank.devices, **part.rank.coordinates._asdict()}} if part.rank else {}),
        }
        for part in parts
    ]


def format_size(count: float) -> str:
    """Return a number of bytes as text, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _make_layout_table(parts: Sequence[ComponentNeeds]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Where the parts go", title_justify="left")
    for heading in ("part", "lives as", "on", "threads"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "threads" else "left")
    ranked = any(part.rank for part in parts)
    if ranked:
        table.add_column("rank", no_wrap=True)
    table.add_column("needs", justify="right", no_wrap=True)
    table.add_column("for")
    for part in parts:
        away = {name for name in part.needs if name.startswith(HOST) and part.memory != HOST}
        what = ", ".join(_describe_need(name, size, away) for name, size in part.needs.items())
        here = sum(size for name, size in part.needs.items() if name not in away)
        table.add_row(
            part.name,
            part.lives,
            part.memory,
            str(part.threads) if part.threads else "–",
            *([part.rank.summary if part.rank else "–"] if ranked else []),
            format_size(here) if part.needs else "–",
            what or "–",
        )
    return table


def _describe_need(purpose: str, size: int, away: Collection[str]) -> str:
    on_host = " on the host" if purpose in away else ""
    return f"{purpose.removeprefix(HOST + ':')} {format_size(size)}{on_host}"


def _describe_fit(where: str, size: int, free: int | None, more: str) -> str:
    name = "memory of the host" if where == HOST else f"memory of {where}"
    if free is None:
        return f"{name}: {format_size(size)}{more}; how much is free cannot be said here"
    fits = "fits" if size < free else "does not fit"
    return f"{name}: {format_size(size)}{more}, {format_size(free)} free: {fits}"
