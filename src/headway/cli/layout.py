"""Which part of a run lives where, as a table: for `headway train … --dry-run` and `headway cluster check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from headway.build.needs import HOST, Part, totals
from headway.cli.machine import free_memory


def show_layout(parts: Sequence[Part], console: Console) -> None:
    """The parts, and whether what they need is there."""
    console.print(_table(parts))
    there = free_memory()
    for where, size in totals(list(parts)).items():
        console.print(_verdict(where, size, there), markup=False)


def as_json(parts: Sequence[Part]) -> list[dict[str, object]]:
    """The same for machines."""
    return [
        {
            "name": part.name,
            "lives": part.lives,
            "memory": part.memory,
            "threads": part.threads,
            "needs": dict(part.needs),
            **({"rank": {"devices": part.rank.devices, **part.rank.seat._asdict()}} if part.rank else {}),
        }
        for part in parts
    ]


def size_text(count: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _table(parts: Sequence[Part]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Where the parts go", title_justify="left")
    for heading in ("part", "lives as", "on", "threads"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "threads" else "left")
    ranked = any(part.rank for part in parts)
    if ranked:
        table.add_column("rank", no_wrap=True)
    table.add_column("needs", justify="right", no_wrap=True)
    table.add_column("for")
    for part in parts:
        what = ", ".join(f"{name.removeprefix(HOST + ':')} {size_text(size)}" for name, size in part.needs.items())
        table.add_row(
            part.name,
            part.lives,
            part.memory,
            str(part.threads) if part.threads else "–",
            *([part.rank.text if part.rank else "–"] if ranked else []),
            size_text(part.total) if part.needs else "–",
            what or "–",
        )
    return table


def _verdict(where: str, size: int, there: Mapping[str, int]) -> str:
    name = "memory of the host" if where == HOST else f"memory of {where}"
    free = there.get(where)
    if free is None:
        return f"{name}: {size_text(size)} and activations; how much is free cannot be said here"
    fits = "fits" if size < free else "does not fit"
    return f"{name}: {size_text(size)} and activations, {size_text(free)} free: {fits}"
