"""Does a denoising model learn to write, and does it learn the same when drawing runs ahead of training?

    python benchmarks/image_learning.py --seeds 1 2 3 --alphas 0 1 --steps 20 --keep runs.npz
    python benchmarks/image_learning.py --read runs.npz --out docs/results/image_learning.jsonl \\
        --grid docs/results/image_learning.png --curves docs/results/image_learning.svg

Every run is `headway train examples/images.yaml` with the cell's α and seed, in its own processes, `--at-once` at a
time. Before and after, the same held-out strings are drawn from the same noise by the ODE, and read by the OCR that was
trained against and by another one (tesseract), if they are installed. `--keep` writes numbers and pictures after every
run, so that `--read` can use other readers later, on another machine. Better policies make more groups without
variance, which are replaced, so late steps take longer: `--limit-s` stops a run that takes too long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.pictures.comparison_grid import make_comparison_grid
from benchmarks.pictures.reward_curves import draw_reward_curves
from benchmarks.pictures.saved_runs import SavedRuns, load_saved_runs

from headway.data.generated_tasks import StringSet
from headway.denoising.image_evaluation import draw_images, measure_legibility
from headway.denoising.models.denoiser_storage import TEXT_IMAGES, find_shipped_model, load_small_mmdit
from headway.errors import ConfigError
from headway.monitor.event_files import read_event_log
from headway.rewards.images.image_reward import encode_png
from headway.rewards.images.ocr_reward import READERS, make_reader
from headway.runs.run_directory import find_checkpoint_of_run
from headway.types import Image

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "images.yaml"
STRINGS = StringSet()
_MEASURES = ("clip_fraction", "lag_mean", "ratio_max")
_GRACE_S = 30.0
_ROLES = ("actor_train", "actor_infer")


def run(args: argparse.Namespace, directory: Path, alpha: float, seed: int) -> dict[str, Any]:
    """Run one cell; return its curves and how long it took."""
    began_s = time.monotonic()
    path = os.pathsep.join(one for one in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if one)
    child = subprocess.Popen(
        [sys.executable, "-m", "headway", "train", str(EXAMPLE), *make_overrides(args, directory, alpha, seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    output, stopped = wait_for_child(child, args.limit_s)
    cell = {"alpha": alpha, "seed": seed, "process_s": round(time.monotonic() - began_s, 1), "stopped": stopped}
    if child.returncode and not stopped:
        return {**cell, "failed": output[-400:]}
    return {**cell, **read_curves(directory)}


def make_overrides(args: argparse.Namespace, directory: Path, alpha: float, seed: int) -> list[str]:
    """Return the overrides of the example's configuration."""
    found = [f"output_dir={directory}", f"async_generation_ratio={alpha:g}", f"seed={seed}", "track_with=[]"]
    if args.steps:
        found += [f"max_steps={args.steps}", f"save_steps={max(args.steps // 4, 1)}"]
    if args.threads:
        found += [f"{role}.strategy_args.strategy_config.num_threads={args.threads}" for role in _ROLES]
    return [*found, *args.set]


def wait_for_child(child: subprocess.Popen[str], limit_s: float | None) -> tuple[str, bool]:
    """Return its output, and whether it was interrupted at the limit, which keeps what it had learned."""
    try:
        return child.communicate(timeout=limit_s)[0], False
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
    try:
        return child.communicate(timeout=_GRACE_S)[0], True
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()[0], True


def read_curves(run: Path) -> dict[str, Any]:
    """Return held-out and training rewards by step, samples dropped until then, and measures of staleness."""
    events = list(read_event_log(run))
    held_out = [[event.data["trained"], event.data["reward"]] for event in events if event.kind == "validate.end"]
    found: dict[str, Any] = {"held_out": held_out, "reward": [], "dropped": [], "end_s": []}
    found |= {name: [] for name in _MEASURES}
    dropped = 0
    for event in events:
        if event.kind == "sample.end":
            dropped += event.data["end"] == "dropped"
        elif event.kind == "step.end":
            found["reward"].append(event.data["reward"])
            found["dropped"].append(dropped)
            found["end_s"].append(round(event.time_s, 2))
            for name in _MEASURES:
                found[name].append(round(event.data[f"train/{name}"], 5))
    return found


def read_images(images: list[Image], strings: list[str], known: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return reward and share of exact strings by reader; readers that are not installed leave what is known."""
    found = dict(known)
    for name in READERS:
        if name in found:
            continue
        try:
            read = make_reader(name, alphabet=STRINGS.alphabet, timeout_s=60)
        except ConfigError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        result = asyncio.run(measure_legibility(images, strings, read))
        found[name] = [round(result.reward, 4), round(result.exact, 4)]
    return found


def main() -> None:
    """Run every cell, or read saved runs, and print one table."""
    args = parse_arguments()
    runs = load_saved_runs(args.read) if args.read else run_all(args)
    read_all(runs)
    if args.keep:
        runs.save(args.keep)
    if args.out:
        args.out.write_text("".join(json.dumps(cell) + "\n" for cell in runs.cells), encoding="utf-8")
    if args.grid and runs.after and runs.after[0]:
        args.grid.write_bytes(encode_png(make_comparison_grid(runs.before[:24], runs.after[0][:24])))
    if args.curves:
        args.curves.write_text(draw_reward_curves(runs.cells), encoding="utf-8")
    show(runs)


def run_all(args: argparse.Namespace) -> SavedRuns:
    """Run every cell, `at_once` at a time, and save each as it ends."""
    strings = STRINGS.list_held_out(args.strings)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {args.at_once} runs at once"
    runs = SavedRuns(
        strings=strings, before=draw_images(load_small_mmdit(find_shipped_model(TEXT_IMAGES)), strings), machine=machine
    )
    cells = list(product(args.alphas, args.seeds))
    with (
        tempfile.TemporaryDirectory(prefix="headway-image-learning-") as scratch,
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        directories = {cell: Path(scratch) / f"{cell[0]:g}-{cell[1]}" for cell in cells}
        futures = {pool.submit(run, args, directories[cell], *cell): cell for cell in cells}
        for done in as_completed(futures):
            checkpoint = find_checkpoint_of_run(directories[futures[done]])
            runs.add(
                done.result(), draw_images(load_small_mmdit(checkpoint), strings) if checkpoint is not None else []
            )
            print(json.dumps(done.result()), file=sys.stderr, flush=True)
            if args.keep:
                runs.save(args.keep)
    return runs


def read_all(runs: SavedRuns) -> None:
    """Read all pictures with the installed readers that have not read them yet."""
    runs.read_before = read_images(runs.before, runs.strings, runs.read_before)
    for cell, images in zip(runs.cells, runs.after, strict=True):
        if images:
            cell |= {"before": runs.read_before, "after": read_images(images, runs.strings, cell.get("after", {}))}


def show(runs: SavedRuns) -> None:
    """Print a row for each run."""
    readers = [f"{name}: reward, exact" for name in READERS]
    title = f"{runs.machine}, {len(runs.strings)} held-out strings, before → after"
    table = Table("α", "seed", "steps", *readers, "training reward, first → last", "s", title=title)
    for cell in runs.cells:
        if "after" not in cell:
            table.add_row(f"{cell['alpha']:g}", str(cell["seed"]), "", f"failed: {cell.get('failed', '')[-120:]}")
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
        steps = str(len(cell["reward"]))
        table.add_row(f"{cell['alpha']:g}", str(cell["seed"]), steps, *read, curve, f"{cell['process_s']:.0f}")
    Console(width=150).print(table)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--strings", type=int, default=100, help="held-out strings that are read before and after")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--threads", type=int, help="of each trainer and each engine")
    parser.add_argument("--limit-s", type=float, help="of one run, which is then stopped and judged as it is")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides for all runs")
    parser.add_argument("--keep", type=Path, help="numbers and pictures of all runs, as .npz")
    parser.add_argument("--read", type=Path, help="what --keep wrote: run nothing, ask the readers that are here")
    parser.add_argument("--out", type=Path, help="numbers, a line of JSON for each run")
    parser.add_argument("--grid", type=Path, help="PNG of the first run's pictures, before and after")
    parser.add_argument("--curves", type=Path, help="SVG of all runs' rewards")
    return parser.parse_args()


if __name__ == "__main__":
    main()
