"""The same run as processes of this machine and as actors on three nodes of Ray: what does the cluster cost?

    python benchmarks/clusters.py                      # a tiny model learns to add, some minutes
    python benchmarks/clusters.py --example --model smollm2-135m-instruct --steps 4 --seeds 1 --store-mb 2000

Every run is `headway train` with one trainer and two engines of one thread each, in a process of its own, local and on
Ray for every seed, in turns which is first. The three nodes are three raylets on this machine with a store each
(`ray.cluster_utils.Cluster`): bytes between them go through the loopback interface, so a network is not measured. The
nodes are there before a run begins. Times are from the first step to the last: starting is a number of its own. An
update is from the end of a step until the last engine serves its weights.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.monitor.events import Event, read_events

ROOT = Path(__file__).parents[1]
SUMS = {
    "async_generation_ratio": 1,
    "pg_variant": "tis",
    "rollout_batch_size": 16,
    "num_return_sequences_in_group": 8,
    "prompt_length": 48,
    "response_length": 4,
    "actor_train.model_args.disable_gradient_checkpointing": "true",
    "actor_train.training_args.learning_rate": 1e-3,
    "actor_train.training_args.per_device_train_batch_size": 16,
    "actor_train.data_args.file_name": "addition",
    "rewards.arithmetic.reward_fn": "numeric",
    "rewards.arithmetic.tag_included": "addition",
}
"""What `tiny-sums` learns within a minute."""
THREADS = "strategy_args.strategy_config.num_threads"


def main() -> None:
    """Run every pair, print one table."""
    args = _arguments()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headway-clusters-") as scratch, three_nodes(args) as address:
        for turn, seed in enumerate(args.seeds):
            kinds = ("local", "ray") if turn % 2 == 0 else ("ray", "local")
            for kind in kinds:
                found.append(run(args, Path(scratch) / f"{kind}-{seed}", kind, seed, address))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    show(args, found)


@contextmanager
def three_nodes(args: argparse.Namespace) -> Iterator[str]:
    """Raylets of one slot each on this machine; the address of their head."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": args.store_mb << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def run(args: argparse.Namespace, directory: Path, kind: str, seed: int, address: str) -> dict[str, Any]:
    """One of them: its curves, and how long things took."""
    task = [str(ROOT / "examples" / "arithmetic.yaml")] if args.example else [f"{k}={v}" for k, v in SUMS.items()]
    words = [
        f"output_dir={directory}",
        f"pretrain={args.model}",
        f"seed={seed}",
        f"max_steps={args.steps}",
        f"eval_steps={max(args.steps // 4, 1)}",
        "save_steps=0",
        "track_with=[]",
        "device=cpu",
        "num_gpus_per_node=1",
        "actor_train.device_mapping=[0]",
        "actor_infer.device_mapping=[1,2]",
        f"actor_train.{THREADS}=1",
        f"actor_infer.{THREADS}=1",
        *(["cluster.kind=ray", f"cluster.address={address}"] if kind == "ray" else ["processes=true"]),
        *args.set,
    ]
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", *task, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    if done.returncode:
        raise SystemExit(f"{kind}, seed {seed}: {(done.stderr or done.stdout)[-2000:]}")
    with (directory / "events.jsonl").open(encoding="utf-8") as lines:
        events = list(read_events(lines))
    return {"kind": kind, "seed": seed, "process_s": round(time.monotonic() - began_s, 1), **measured(events)}


def measured(events: list[Event]) -> dict[str, Any]:
    """Seconds of a step, of an update and of the start, and the rewards."""
    steps = [event for event in events if event.kind == "step.end"]
    ended = {event.data["trained"]: event.time_s for event in steps}
    served: dict[int, float] = {}
    for event in events:
        if event.kind == "served" and event.data["version"] in ended:
            served[event.data["version"]] = event.time_s
    updates = [served[version] - ended[version] for version in served if version > 1]
    held_out = [event.data["reward"] for event in events if event.kind == "validate.end"]
    return {
        "start_s": round(next(event.time_s for event in events if event.kind == "served") - events[0].time_s, 2),
        "step_s": round((steps[-1].time_s - steps[0].time_s) / (len(steps) - 1), 3),
        "update_s": round(median(updates), 4),
        "held_out": [round(reward, 3) for reward in held_out],
        "reward": [round(event.data["reward"], 3) for event in steps],
        "samples": sum(event.kind == "sample.end" and event.data["end"] == "trained" for event in events),
    }


def show(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """A row for each run, then the means and their ratio."""
    title = f"{args.model}, {args.steps} steps; {platform.machine()}, {os.cpu_count()} cores"
    table = Table(
        "on", "seed", "start, s", "s a step", "update, s", "held-out", "reward, first and last 5", title=title
    )
    for one in found:
        first, last = mean(one["reward"][:5]), mean(one["reward"][-5:])
        table.add_row(
            one["kind"],
            str(one["seed"]),
            f"{one['start_s']:.1f}",
            f"{one['step_s']:.3f}",
            f"{one['update_s']:.3f}",
            " → ".join(f"{reward:.2f}" for reward in one["held_out"]),
            f"{first:.2f}, {last:.2f}",
        )
    for what in ("step_s", "update_s", "start_s"):
        local, ray = (mean(one[what] for one in found if one["kind"] == kind) for kind in ("local", "ray"))
        table.add_row(f"mean {what}", "", "", f"local {local:.3f}", f"ray {ray:.3f}", f"ratio {ray / local:.3f}", "")
    Console(width=140).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-sums")
    parser.add_argument("--example", action="store_true", help="examples/arithmetic.yaml instead of sums")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--store-mb", type=int, default=300, help="object store of each node")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="more of the configuration")
    return parser.parse_args()


if __name__ == "__main__":
    main()
