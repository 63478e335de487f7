"""Formats the results: aligned tables, a summary line, and the page under docs/results."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.scaling.cells import Cell

PAGE = Path(__file__).parents[2] / "docs" / "results" / "scaling.md"
HEAD = ("row", "column", "published", "simulated", "ratio", "")


def group_by_table(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells by table, in order."""
    tables: dict[str, list[Cell]] = {}
    for cell in cells:
        tables.setdefault(cell.table, []).append(cell)
    return tables


def format_number(value: float | None) -> str:
    """Return about three significant digits; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def format_cell(cell: Cell) -> tuple[str, ...]:
    """Return one line of a table."""
    mark = "FAILED" if cell.failed else ""
    if cell.checked and not cell.is_within and cell.reason is not None:
        mark = "listed"
    elif not cell.checked:
        mark = "not checked"
    return (
        cell.row,
        cell.column,
        format_number(cell.published),
        format_number(cell.simulated),
        format_number(cell.ratio),
        mark,
    )


def format_text_table(name: str, cells: Sequence[Cell]) -> str:
    """Return a table aligned for a terminal."""
    rows = [HEAD, *(format_cell(cell) for cell in cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(part.ljust(width) for part, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"== {name} ==", *lines, ""])


def format_summary(cells: Sequence[Cell]) -> str:
    """Return the summary line."""
    checked = [cell for cell in cells if cell.checked]
    within = sum(cell.is_within for cell in checked)
    failed = sum(cell.failed for cell in checked)
    listed = len(checked) - within - failed
    return f"{len(checked)} cells, {within} within 15 %, {listed} on the list, {failed} failed"


def format_page(cells: Sequence[Cell], *, seconds: float, full: bool) -> str:
    """Return the page as Markdown."""
    lines = [
        "# Published scaling results, simulated",
        "",
        "The tables of ROLL Flash (arXiv 2510.11345) against the real flow on the virtual clock, with one calibration",
        "per model and one for each table that is an experiment of its own. The calibrations were fitted to these",
        "same tables, by hand after a search, so agreement shows that a few physical constants explain most cells",
        "together; it is not a prediction of cells never seen. The list of exceptions was written after seeing which",
        "cells were off, and only seed 1 is checked. Synchronous cells are one step each: the one",
        "on 40 GPUs comes out at 0.99, 0.89, 0.89, 0.78 of the published time for seeds 0 to 3, so another seed",
        "would fail other synchronous cells. The asynchronous cells of that table move by 5 % or less.",
        "The bound's “published” column is the paper's formula.",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {read_commit()}, seed 1 "
        "(queue scheduling: first steps of seeds 0, 1, …), "
        f"{'unfolded' if full else 'asynchronous runs folded'}, {seconds:.0f} s. "
        "Made by `python -m benchmarks.scaling --write`.",
        "",
        f"**{format_summary(cells)}.**",
        "",
    ]
    for name, members in group_by_table(cells).items():
        lines += [f"## {name[0].upper()}{name[1:]}", "", "| row | column | published | simulated | ratio | |"]
        lines += ["|---|---|---:|---:|---:|---|"]
        lines += ["| " + " | ".join(format_cell(cell)) + " |" for cell in members]
        lines += [""]
    known = [cell for cell in cells if cell.checked and not cell.is_within and cell.reason is not None]
    lines += ["## Cells on the list", ""]
    lines += [
        f"- {cell.table}, {cell.row}, {cell.column} ({format_number(cell.ratio)}): {cell.reason}" for cell in known
    ]
    return "\n".join(lines) + "\n"


def read_commit() -> str:
    """Return the commit that was measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=PAGE.parent.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
