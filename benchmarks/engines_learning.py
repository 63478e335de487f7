"""Does a run learn on vLLM as it does on our own engine? The task of the demo on both, same seeds, one after the other.

    make test-vllm                                  # makes the environment that has vLLM
    python benchmarks/engines_learning.py --steps 8
    python benchmarks/engines_learning.py --alphas 0 --steps 3 --engines vllm

Every run is `headway train examples/arithmetic.yaml`; with vLLM, the run starts the server itself. Seconds are from the
first version served to the last step, so that the start of a server does not count. Mismatch is what the engine says
about its tokens against what the trainer says about them, over steps all of whose samples were made by the weights that
are trained (lag 0): all steps at α = 0, and the first one otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.monitor.events import Event, read_events

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic.yaml"
STRATEGY = "actor_infer.strategy_args"


def overrides(engine: str, python: str) -> list[str]:
    """What a run on this engine says beside the example."""
    if engine == "native":
        return []
    return [
        f"{STRATEGY}.strategy_name=vllm",
        f"{STRATEGY}.strategy_config.launch=true",
        f"{STRATEGY}.strategy_config.server_python={python}",
        f"{STRATEGY}.strategy_config.server_args={{enforce-eager: true}}",
    ]


def run(args: argparse.Namespace, scratch: Path, engine: str, alpha: float, seed: int) -> dict[str, Any]:
    """One run, in a process of its own: its curves, and how long it took."""
    directory = scratch / f"{engine}-{alpha:g}-{seed}"
    words = [
        f"output_dir={directory}",
        f"async_generation_ratio={alpha:g}",
        f"seed={seed}",
        f"max_steps={args.steps}",
        f"eval_steps={args.eval_steps or args.steps}",
        "save_steps=0",
        "track_with=[]",
        *overrides(engine, str(args.python)),
        *args.set,
    ]
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", str(EXAMPLE), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    cell = {"engine": engine, "alpha": alpha, "seed": seed, "process_s": time.monotonic() - began_s}
    if done.returncode:
        return {**cell, "failed": (done.stderr or done.stdout)[-2000:]}
    return {**cell, **curves(directory / "events.jsonl")}


def curves(log: Path) -> dict[str, Any]:
    """Rewards and seconds by step, weight updates, and how far engine and trainer are apart."""
    with log.open(encoding="utf-8") as lines:
        events = list(read_events(lines))
    steps = [event for event in events if event.kind == "step.end"]
    fresh = [event.data for event in steps if event.data["train/lag_max"] == 0]
    served_s = next(event.time_s for event in events if event.kind == "served")
    times_s = [served_s, *(event.time_s for event in steps)]
    return {
        "held_out": [[event.data["trained"], event.data["reward"]] for event in events if event.kind == "validate.end"],
        "reward": [event.data["reward"] for event in steps],
        "step_s": [later - earlier for earlier, later in pairwise(times_s)],
        "training_s": times_s[-1] - served_s,
        "load_s": loads_s(events),
        "lag": mean(event.data["train/lag_mean"] for event in steps),
        "kl": [event.data["train/behaviour_kl"] for event in steps],
        "fresh_steps": len(fresh),
        "mismatch_kl": mean(data["train/behaviour_kl"] for data in fresh) if fresh else None,
        "mismatch_ratio_mean": mean(data["train/ratio_mean"] for data in fresh) if fresh else None,
        "mismatch_ratio_max": max(data["train/ratio_max"] for data in fresh) if fresh else None,
    }


def loads_s(events: list[Event]) -> list[float]:
    """Seconds from the first bucket of a version to its flip, without the first version."""
    begun = {e.data["span"]: e.time_s for e in events if e.kind == "span.begin" and e.data["name"].startswith("load ")}
    ends = [event for event in events if event.kind == "span.end" and event.data["span"] in begun]
    return [event.time_s - begun[event.data["span"]] for event in ends][1:]


def main() -> None:
    """Run every cell, print one table."""
    args = arguments()
    found = []
    with tempfile.TemporaryDirectory(prefix="headway-engines-") as scratch:
        for alpha, seed, engine in product(args.alphas, args.seeds, args.engines):
            found.append(run(args, Path(scratch), engine, alpha, seed))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(cell) + "\n" for cell in found)
    show(args, found)


def show(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """A row for each run."""
    table = Table("engine", "α", "seed", "held out", "reward by step", "s/step", "load s", "KL", "ratio mean, max", "s")
    table.title = f"{platform.machine()}, {os.cpu_count()} cores, {args.steps} steps"
    for cell in found:
        row = [cell["engine"], f"{cell['alpha']:g}", str(cell["seed"])]
        if "failed" in cell:
            table.add_row(*row, f"failed: {cell['failed'][-300:]}")
            continue
        kl, ratios = "", ""
        if cell["fresh_steps"]:
            kl = f"{cell['mismatch_kl']:.1e}"
            ratios = f"{cell['mismatch_ratio_mean']:.5f}, {cell['mismatch_ratio_max']:.4f}"
        table.add_row(
            *row,
            " → ".join(f"{reward:.2f}" for _, reward in cell["held_out"]),
            " ".join(f"{reward:.2f}" for reward in cell["reward"]),
            f"{median(cell['step_s']):.1f}",
            f"{median(cell['load_s']):.2f}" if cell["load_s"] else "",
            kl,
            ratios,
            f"{cell['training_s']:.0f}",
        )
    Console(width=180).print(table)


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--engines", nargs="+", choices=("native", "vllm"), default=["native", "vllm"])
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python", help="that has vLLM")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--eval-steps", type=int)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides for all runs")
    parser.add_argument("--out", type=Path, help="appended to, a line for each run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
