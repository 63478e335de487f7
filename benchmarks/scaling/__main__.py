"""`python -m benchmarks.scaling [--quick] [--full] [--write] [--table NAME]`: exit code 1 if a cell is off.

`--quick` is the resource split alone; `--full` simulates every prompt and GPU instead of folding asynchronous runs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator

from benchmarks.scaling import agentic_tables, training_tables
from benchmarks.scaling.cells import Cell
from benchmarks.scaling.report import PAGE, format_page, format_summary, format_text_table, group_by_table

TABLES: dict[str, Callable[[], Iterator[Cell]]] = {
    "split": training_tables.simulate_split,
    "think": lambda: training_tables.simulate_gpu_count("think"),
    "base": lambda: training_tables.simulate_gpu_count("base"),
    "batch": training_tables.simulate_batch,
    "alpha": training_tables.simulate_alpha,
    "alpha-needed": training_tables.simulate_alpha_needed,
    "queue": training_tables.simulate_queue,
    "replication": training_tables.simulate_replication,
    "environment": agentic_tables.simulate_environment_async,
    "redundant": agentic_tables.simulate_redundant,
    "tasks": agentic_tables.simulate_tasks,
    "bound": agentic_tables.compute_bound,
    "large": agentic_tables.simulate_large,
    "losing": agentic_tables.simulate_losing,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the resource split alone")
    parser.add_argument("--full", action="store_true", help="no folding; takes several times as long")
    parser.add_argument("--write", action="store_true", help="write docs/results/scaling.md")
    parser.add_argument("--table", action="append", choices=TABLES, help="only this one; may be repeated")
    options = parser.parse_args()
    gc.set_threshold(200_000, 20, 50)  # a run makes millions of small objects and hardly any cycles
    training_tables.FULL = options.full
    started_s = time.monotonic()
    cells: list[Cell] = []
    for name in ["split"] if options.quick else options.table or TABLES:
        begun_s = time.monotonic()
        found = list(TABLES[name]())
        cells += found
        for title, members in group_by_table(found).items():
            print(format_text_table(title, members))
        print(f"({name}: {time.monotonic() - begun_s:.0f} s)\n", flush=True)
    print(format_summary(cells))
    if options.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(format_page(cells, seconds=time.monotonic() - started_s, full=options.full), encoding="utf-8")
    return 1 if any(cell.failed for cell in cells) else 0


if __name__ == "__main__":
    raise SystemExit(main())
