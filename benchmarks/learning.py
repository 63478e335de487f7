"""Does it learn, and what do staleness and the policy loss change? The task of the demo, one run for each cell.

    python benchmarks/learning.py --seeds 1 2 3                                    # the demo on three seeds
    python benchmarks/learning.py --alphas 0 1 2 --losses tis cispo decoupled_ppo topr kimi15 vanilla
    python benchmarks/learning.py --model tiny-sums --losses tis --steps 40        # in seconds
    python benchmarks/learning.py --example examples/gsm8k.yaml --alphas 0 1       # another task

Every run is `headway train examples/arithmetic.yaml` with the cell's α, loss and seed, in a process of its own; as many
at a time as `--parallel` says (times mean something with one). Held-out reward: problems never trained on, answers
drawn at temperature 1. Curves go to `--out`, a line for every run as it ends; `benchmarks/curves.py` draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.monitor.event_files import read_event_log

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic.yaml"
LOSSES = ("tis", "cispo", "decoupled_ppo", "topr", "kimi15", "vanilla", "ppo", "gspo")


def run(args: argparse.Namespace, scratch: Path, alpha: float, loss: str, seed: int, extra: str) -> dict[str, Any]:
    """One cell: its curves, and how long it took."""
    run_dir = scratch / f"{loss}-{alpha:g}-{seed}-{abs(hash(extra)) % 10_000}"
    overrides = [
        f"output_dir={run_dir}",
        f"async_generation_ratio={alpha:g}",
        f"pg_variant={loss}",
        f"seed={seed}",
        "allow_uncorrected_async=true",
        "save_steps=0",
        "track_with=[]",
        *([f"max_steps={args.steps}"] if args.steps else []),
        *([f"eval_steps={args.eval_steps}"] if args.eval_steps else []),
        *([f"pretrain={args.model}"] if args.model else []),
        *args.set,
        *extra.split(),
    ]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", str(args.example), *overrides],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    cell = {"alpha": alpha, "loss": loss, "seed": seed, "extra": extra, "process_s": time.monotonic() - began_s}
    if done.returncode:
        return {**cell, "failed": (done.stderr or done.stdout)[-400:]}
    found = {**cell, **curves(run_dir)}
    shutil.rmtree(run_dir)  # checkpoints of many cells fill a disk
    return found


def curves(run: Path) -> dict[str, Any]:
    """Held-out and training rewards by step, lag, and seconds since the first version was served."""
    events = list(read_event_log(run))
    steps = [event for event in events if event.kind == "step.end"]
    validated = [event for event in events if event.kind == "validate.end"]
    served_s = next(event.time_s for event in events if event.kind == "served")
    return {
        "held_out": [[event.data["trained"], event.data["reward"]] for event in validated],
        "held_out_s": [round(event.time_s - served_s, 2) for event in validated],
        "reward": [event.data["reward"] for event in steps],
        "step_s": [round(event.time_s - served_s, 2) for event in steps],
        "lag": mean(event.data["train/lag_mean"] for event in steps),
        "training_s": steps[-1].time_s - served_s,
        "steps": len(steps),
    }


def main() -> None:
    """Run every cell, print one table."""
    args = arguments()
    cells = list(product(args.losses, args.alphas, args.extra or [""], args.seeds))
    with tempfile.TemporaryDirectory(prefix="headway-learning-") as scratch, ThreadPoolExecutor(args.parallel) as pool:
        jobs = [pool.submit(run, args, Path(scratch), alpha, loss, seed, extra) for loss, alpha, extra, seed in cells]
        found = []
        for job in jobs:
            found.append(job.result())
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            if args.out:
                args.out.write_text("".join(json.dumps(cell) + "\n" for cell in found), encoding="utf-8")
    show(args, found)


def show(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """A row for each loss and α; several seeds side by side."""
    table = Table(
        "loss", "α", "held-out before → after", "mean", "training reward, last 3", "lag", "s", title=machine(args)
    )
    for loss, alpha, extra in dict.fromkeys((cell["loss"], cell["alpha"], cell["extra"]) for cell in found):
        group = [c for c in found if (c["loss"], c["alpha"], c["extra"]) == (loss, alpha, extra)]
        good = [cell for cell in group if "failed" not in cell]
        if not good:
            table.add_row(loss, f"{alpha:g}", f"failed: {group[0]['failed'][-80:]}")
            continue
        table.add_row(
            f"{loss} {extra}".strip(),
            f"{alpha:g}",
            ", ".join(f"{cell['held_out'][0][1]:.2f} → {cell['held_out'][-1][1]:.2f}" for cell in good),
            f"{mean(cell['held_out'][-1][1] for cell in good):.2f}",
            f"{mean(mean(cell['reward'][-3:]) for cell in good):.2f}",
            f"{mean(cell['lag'] for cell in good):.2f}",
            f"{mean(cell['training_s'] for cell in good):.0f}",
        )
    Console(width=160).print(table)


def machine(args: argparse.Namespace) -> str:
    """Where and what."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    commit = done.stdout.strip() or "unknown"
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, commit {commit}, seeds {args.seeds}, {args.parallel} at a time"
    )


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["tis"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--extra", nargs="*", help="further columns: each a text of overrides")
    parser.add_argument("--example", type=Path, default=EXAMPLE)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--eval-steps", type=int)
    parser.add_argument("--model")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides for all runs")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
