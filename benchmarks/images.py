"""Whole runs of a denoising model: the gain of scoring beside denoising, and of letting rollout run ahead.

    python benchmarks/images.py                                # two cores, one for each part: 1M parameters
    python benchmarks/images.py --device cuda --parameters 126M --height 64 --width 64 --patch 2 --workers 8
    python benchmarks/images.py --parameters 0.1M --prompts 2 --group 2 --steps 2 --warmup 1      # does it run at all?

Every row has the same model, batch, denoising steps, engine slots and scorer. Only the order of work differs.

    serial        `with_reward: false`: all pictures of a step are made, then all are scored, then trained on
    with_reward   a picture is scored as soon as it is done, while the next ones are made
    hybrid        trainer and engine take turns (α = 0); decoupled: both run at once, one step or α steps apart

The first row has free scores and measures the cost of denoising, training and a weight update. The scorers of the other
rows are as expensive as can still be hidden (`--scoring` times that, or as `--score-ms` and `--latency-s` say). `cpu`
computes in `--workers` processes and takes as long for the pictures of a step as denoising them. `http` is a server
that costs nothing on this machine and answers `--connections` requests at a time, so slowly that the pictures of a step
take as long as denoising and training together. Scores are random, so that no group is dropped.

The prediction beside each measurement comes from the simulator: the same scheduler on a virtual clock, which knows only
the costs of the first row and of a score. It gives decoupled trainer and engine a device each: `--threads` cores, if
there are enough. On one GPU, no step takes less than denoising and training together. The last table counts the rows
that the denoiser computes for one group, with and without a shared prefix. Every row is printed when it is done; after
`--limit-s` no other row begins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.pictures.prediction import predict_row
from benchmarks.pictures.prefixes import measure_prefix_sharing
from benchmarks.pictures.rows import ROWS, Row, measure_costs
from benchmarks.pictures.scorers import start_server

from headway.config import ResolvedConfig, load_config
from headway.denoising.models.denoiser_storage import save_small_mmdit
from headway.denoising.models.mmdit import MmditConfig, SmallMmdit, count_parameters
from headway.launch.training_session import open_run_directory, prepare_run, run_training
from headway.monitor.event_log import LoggedEvent
from headway.processes.child_process import count_usable_cores

ROLES = ("actor_train", "actor_infer")


def make_model(directory: Path, args: argparse.Namespace) -> int:
    """Save a random model of about so many parameters; return how many it has."""
    wanted = float(args.parameters.rstrip("Mm")) * 1e6
    depth = 2 if wanted < 1e6 else 4 if wanted < 2e7 else 12
    head = 32 if wanted < 2e7 else 64
    size = {"height": args.height, "width": args.width, "patch": args.patch, "channels": 3}
    shapes = (MmditConfig(dim=dim, depth=depth, heads=dim // head, **size) for dim in range(head, 4096, head))
    with torch.device("meta"):  # shapes without memory
        shape = min(shapes, key=lambda shape: abs(count_parameters(SmallMmdit(shape)) - wanted))
    model = SmallMmdit(shape, seed=0)
    save_small_mmdit(model, directory)
    return count_parameters(model)


def make_reward_config(args: argparse.Namespace, row: Row, url: str) -> dict[str, Any]:
    """Return the configuration of a row's scorer."""
    chosen: dict[str, Any] = {"reward_fn": "benchmarks.pictures.scorers:RandomScores"}
    if row.scorer == "cpu":
        work = {"score_s": args.score_ms / 1000, "workers": args.workers}
        chosen = {"reward_fn": "benchmarks.pictures.scorers:ComputingReward", "reward_args": work}
    elif row.scorer == "http":
        options = {"url": url, "batch": 1, "concurrency": args.connections}
        chosen = {"reward_fn": "image_server", "reward_args": options}
    return chosen


def make_config(args: argparse.Namespace, row: Row, model: Path, url: str, run_dir: Path) -> ResolvedConfig:
    """Return the configuration of a row; rows differ only in the order of work."""
    decoupled = {
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.mode": "async",
        "num_gpus_per_node": 2,
        "async_generation_ratio": row.alpha,
    }
    return load_config(
        {
            "output_dir": str(run_dir),
            "pretrain": str(model),
            "device": args.device,
            "processes": args.processes,
            "denoising": {"window_size": 2},
            "actor_infer.generating_args.num_inference_steps": args.denoising_steps,
            "actor_infer.strategy_args.strategy_config.max_num_seqs": args.slots,
            "rollout_batch_size": args.prompts,
            "num_return_sequences_in_group": args.group,
            "filter_zero_variance": False,
            "with_reward": not row.serial,
            "max_steps": args.warmup + args.steps + row.alpha,
            "save_steps": 0,
            "eval_steps": 0,
            "track_with": [],
            "actor_train.training_args.learning_rate": 1e-6,
            "actor_train.training_args.per_device_train_batch_size": args.micro_batch,
            "actor_train.data_args.file_name": "strings",
            "rewards": {"strings": make_reward_config(args, row, url)},
            **{f"{role}.strategy_args.strategy_config.num_threads": args.threads for role in ROLES},
            **({} if row.hybrid else decoupled),
        }
    )


def measure_row(args: argparse.Namespace, row: Row, resolved: ResolvedConfig) -> dict[str, Any]:
    """Run once and return the costs of the measured steps."""
    events: list[LoggedEvent] = []
    prepared = prepare_run(resolved)
    with open_run_directory(prepared) as directory:
        summary = asyncio.run(run_training(prepared, directory, sinks=[events.append]))
    if not summary.finished:
        raise RuntimeError(f"{row.name} ended early: {summary.reason}")
    return {"row": row.name, "scorer": row.scorer, **measure_costs(args, events)}


def set_scoring_costs(args: argparse.Namespace, known: dict[str, Any]) -> None:
    """Set the cost of a score, unless given, to the largest that can still be hidden."""
    samples = args.prompts * args.group
    hidden_s = args.scoring * known["denoise_s"], args.scoring * (known["denoise_s"] + known["train_s"])
    args.score_ms = args.score_ms or 1000 * hidden_s[0] * args.workers / samples
    args.latency_s = args.latency_s or hidden_s[1] * args.connections / samples


def has_separate_devices(args: argparse.Namespace) -> bool:
    """Return whether trainer and engine compute on different cores."""
    return args.device == "cpu" and 2 * args.threads <= count_usable_cores()


def main() -> None:
    """Run all rows and print the tables."""
    args = parse_arguments()
    scratch, rows = Path(tempfile.mkdtemp(prefix="headway-images-")), []
    began_s = time.monotonic()
    try:
        args.count = make_model(scratch / "model", args)
        with ExitStack() as stack:
            url = ""
            for number, row in enumerate(ROWS):
                if time.monotonic() - began_s > args.limit_s:
                    print(f"{args.limit_s:g} s are over: {len(ROWS) - number} rows are left out", flush=True)
                    break
                resolved = make_config(args, row, scratch / "model", url, scratch / str(number))
                found = measure_row(args, row, resolved)
                known = rows[0] if rows else found
                if not rows:
                    set_scoring_costs(args, found)
                    url = stack.enter_context(start_server(args.latency_s))
                simulated = predict_row(args, row, resolved, known)
                rows.append({**found, "predicted_s": simulated["step_s" if has_separate_devices(args) else "shared_s"]})
                print(json.dumps({**rows[-1], "since_begin_s": round(time.monotonic() - began_s, 1)}), flush=True)
        shared = measure_prefix_sharing(args, scratch / "model")
        print(json.dumps(shared), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show(args, rows, shared)


def show(args: argparse.Namespace, rows: list[dict[str, Any]], shared: list[dict[str, Any]]) -> None:
    """Print both tables."""
    console = Console(width=150, highlight=False)
    console.print(
        f"{args.count / 1e6:.1f}M parameters, pictures of {args.height} × {args.width}, {args.denoising_steps} "
        f"denoising steps, {args.prompts} × {args.group} samples a step, {args.slots} slots; {args.device}, "
        f"{platform.machine()}; scorers: {args.score_ms:.3g} ms in {args.workers} processes, and "
        f"{args.latency_s:.3g} s over {args.connections} connections"
    )
    table = Table(
        "",
        "scorer",
        "step s",
        "samples/s",
        "ratio",
        "denoising s",
        "training s",
        "neither s",
        "lag",
        "predicted s",
        "ratio",
    )
    for row in rows:
        base = next(one for one in rows if one["scorer"] == row["scorer"])
        table.add_row(
            row["row"],
            row["scorer"],
            f"{row['step_s']:.2f}",
            f"{row['samples_per_s']:.1f}",
            f"{base['step_s'] / row['step_s']:.2f}×",
            f"{row['denoise_s']:.2f}",
            f"{row['train_s']:.2f}",
            f"{row['neither_s']:.2f}",
            f"{row['lag']:.2f}",
            f"{row['predicted_s']:.2f}",
            f"{base['predicted_s'] / row['predicted_s']:.2f}×",
        )
    console.print(table)
    table = Table("prefix of a group", "denoiser rows", "saved", "s a group")
    for row in shared:
        saved = 1 - row["calls"] / shared[0]["calls"]
        name = "shared" if row["shared"] else "each its own"
        table.add_row(name, f"{row['calls']:.1f}", f"{saved:.0%}", f"{row['group_s']:.3f}")
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--processes", action=argparse.BooleanOptionalAction, help="trainer and engine apart; the usual: on a CPU only"
    )
    parser.add_argument("--parameters", default="1M", help="of the model, such as 1M or 100M")
    parser.add_argument("--height", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--patch", type=int, default=4)
    parser.add_argument("--denoising-steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--slots", type=int, default=0, help="pictures that are made together; an eighth of a step's")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--scoring", type=float, default=1.0, help="times what can be hidden")
    parser.add_argument("--score-ms", type=float, help="of one verdict in a process of its own")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--latency-s", type=float, help="of one verdict over HTTP")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="after which no other row begins")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer, and of the engine")
    args = parser.parse_args()
    samples = args.prompts * args.group
    args.slots, args.micro_batch = args.slots or max(samples // 8, 1), min(args.micro_batch, samples)
    return args


if __name__ == "__main__":
    main()
