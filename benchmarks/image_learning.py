"""Does a flow model learn to write, and does it learn the same when drawing runs ahead of training?

    python benchmarks/image_learning.py --seeds 1 2 3 --alphas 0 1 --out docs/results/image_learning.jsonl \\
        --grid docs/results/image_learning.png

Every run is `headway train examples/images.yaml` with the cell's α and seed, in a process of its own. Before and after,
the same held-out strings are drawn from the same noise by the ODE, and read by the OCR that was trained against and by
one that was not (tesseract, where it is installed). `--grid` keeps the pictures of the first run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.build.rundir import newest_checkpoint
from headway.data.strings import Strings
from headway.errors import ConfigError
from headway.generative.models import load
from headway.generative.pretrained import TEXT_IMAGES, shipped
from headway.generative.text_images.evaluation import draw, legibility, side_by_side
from headway.monitor.events import read_events
from headway.rewards.images.ocr import READERS, make_reader
from headway.rewards.images.picture import png_of
from headway.types import Image

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "images.yaml"
STRINGS = Strings()


def run(args: argparse.Namespace, directory: Path, alpha: float, seed: int) -> dict[str, Any]:
    """One cell: its curves, what is read before and after, and how long it took."""
    steps = [f"max_steps={args.steps}", f"save_steps={args.steps}"] if args.steps else []
    overrides = [f"output_dir={directory}", f"async_generation_ratio={alpha:g}", f"seed={seed}", "track_with=[]"]
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", str(EXAMPLE), *overrides, *steps, *args.set],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    cell = {"alpha": alpha, "seed": seed, "process_s": round(time.monotonic() - began_s, 1)}
    if done.returncode:
        return {**cell, "failed": (done.stderr or done.stdout)[-400:]}
    return {**cell, **curves(directory / "events.jsonl")}


def curves(log: Path) -> dict[str, Any]:
    """Held-out and training rewards by step, and drops."""
    with log.open(encoding="utf-8") as lines:
        events = list(read_events(lines))
    return {
        "held_out": [[event.data["trained"], event.data["reward"]] for event in events if event.kind == "validate.end"],
        "reward": [event.data["reward"] for event in events if event.kind == "step.end"],
    }


def legible(images: list[Image], strings: list[str]) -> dict[str, list[float]]:
    """Reward and share of exact strings, by reader; nothing for readers that are not here."""
    found: dict[str, list[float]] = {}
    for name in READERS:
        try:
            read = make_reader(name, alphabet=STRINGS.alphabet, timeout_s=60)
        except ConfigError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        result = asyncio.run(legibility(images, strings, read))
        found[name] = [round(result.reward, 4), round(result.exact, 4)]
    return found


def main() -> None:
    """Run every cell, print one table."""
    args = arguments()
    strings = STRINGS.held_out(args.strings)
    before = draw(load(shipped(TEXT_IMAGES)), strings)
    first, found = legible(before, strings), []
    with tempfile.TemporaryDirectory(prefix="headway-image-learning-") as scratch:
        for alpha, seed in product(args.alphas, args.seeds):
            directory = Path(scratch) / f"{alpha:g}-{seed}"
            cell = run(args, directory, alpha, seed)
            checkpoint = newest_checkpoint(directory)
            if checkpoint is not None:
                after = draw(load(checkpoint), strings)
                cell |= {"before": first, "after": legible(after, strings)}
                if args.grid and not found:
                    args.grid.write_bytes(png_of(side_by_side(before[:24], after[:24])))
            found.append(cell)
            print(json.dumps(cell), file=sys.stderr, flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(cell) + "\n" for cell in found), encoding="utf-8")
    show(found, args)


def show(found: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """A row for each run."""
    readers = [f"{name}: reward, exact" for name in READERS]
    title = f"{platform.machine()}, {os.cpu_count()} cores, {args.strings} held-out strings, before → after"
    table = Table("α", "seed", *readers, "training reward, first → last", "s", title=title)
    for cell in found:
        if "after" not in cell:
            table.add_row(f"{cell['alpha']:g}", str(cell["seed"]), f"failed: {cell.get('failed', '')[-120:]}")
            continue
        read = [
            " ".join(
                f"{before:.2f} → {after:.2f}"
                for before, after in zip(cell["before"][name], cell["after"][name], strict=True)
            )
            if name in cell["after"]
            else "–"
            for name in READERS
        ]
        curve = f"{cell['reward'][0]:.2f} → {cell['reward'][-1]:.2f}"
        table.add_row(f"{cell['alpha']:g}", str(cell["seed"]), *read, curve, f"{cell['process_s']:.0f}")
    Console(width=150).print(table)


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--strings", type=int, default=100, help="held-out strings that are read before and after")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides for all runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grid", type=Path, help="PNG of the first run's pictures, before and after")
    return parser.parse_args()


if __name__ == "__main__":
    main()
