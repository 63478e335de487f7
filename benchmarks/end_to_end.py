"""Whole runs on one machine: `headway train` at several α, same model, batch and lengths, one after the other.

    python benchmarks/end_to_end.py                                  # one GPU: 0.5B shape, 32 prompts × 8 × 512 tokens
    python benchmarks/end_to_end.py --mean-length 400 --length 4096 --reward-s 1    # a long tail, and a judge
    python benchmarks/end_to_end.py --shape 7B --lora-rank 32 --mean-length 1000 --length 4096 --alpha 0 1
    python benchmarks/end_to_end.py --shape tiny --prompts 4 --length 16 --device cpu     # does it run at all?

The model is random, of the shape of Qwen2.5, and hardly ever ends an answer, so that all answers are as long as they
may be; with `--mean-length`, so many tokens are called ends that an answer ends after that many on average, which makes
lengths geometric: a few are six times as long as the mean. Rewards are drawn by lot, so that no group can be left out
of training; `--reward-s` makes every verdict wait, as a judge over the network would. Steps after the warm-up count;
the last α steps, whose samples were paid for before, do not. Utilisation is what the driver says ten times a second:
the share of time in which some kernel ran.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.config import load_config
from headway.launch.training_session import open_run_directory, prepare_run, run_training
from headway.monitor.event_log import LoggedEvent

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
LARGE_SHAPES: dict[str, dict[str, int]] = {
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Shapes that only runs with adapters have room for."""
WATCH = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]


def lot(text: str, task_data: Mapping[str, Any], wait_s: float = 0.0, gate: str = "") -> float:
    """A reward that means nothing, after a wait, and not while there is a file `gate`."""
    if wait_s:
        time.sleep(wait_s)
    while gate and Path(gate).exists():
        time.sleep(0.02)
    return zlib.crc32(text.encode()) / 2**32


def make_model(directory: Path, args: argparse.Namespace) -> Path:
    """A random model of the shape, with a tokenizer of characters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from headway.models.tiny_model import make_character_tokenizer

    tokenizer = make_character_tokenizer()
    vocabulary = getattr(args, "vocabulary", 0) or (1000 if args.shape == "tiny" else 151_936)
    ends = [tokenizer.eos_token_id]
    if args.mean_length:
        ends += range(vocabulary - round(vocabulary / args.mean_length), vocabulary)
    usual = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    config = Qwen2Config(
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        **(usual | (SHAPES | LARGE_SHAPES)[args.shape]),
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def configuration(args: argparse.Namespace, model: Path, alpha: int, run_dir: Path) -> dict[str, Any]:
    """The same for every α but for α."""
    return {
        "exp_name": f"alpha-{alpha}",
        "output_dir": str(run_dir),
        "pretrain": str(model),
        "device": args.device,
        "async_generation_ratio": alpha,
        "pg_variant": "tis",
        "filter_zero_variance": False,
        "rollout_batch_size": args.prompts,
        "num_return_sequences_in_group": args.group,
        "prompt_length": 64,
        "response_length": args.length,
        "max_steps": args.warmup + args.steps + alpha,
        "save_steps": 0,
        "eval_steps": 0,
        "track_with": [],
        "actor_train": {
            "model_args": {
                "disable_gradient_checkpointing": not args.checkpointing,
                **({"lora_rank": args.lora_rank} if args.lora_rank else {}),
            },
            "training_args": {"learning_rate": 1e-7, "per_device_train_batch_size": args.micro_batch},
            "data_args": {"file_name": "addition"},
        },
        "rewards": {
            "addition": {
                "reward_fn": f"{__file__}:lot",
                "reward_args": {"wait_s": args.reward_s, "concurrency": 256 if args.reward_s else 8},
            }
        },
    }


def measured(args: argparse.Namespace, model: Path, alpha: int, scratch: Path) -> dict[str, float]:
    """One run, and what its measured steps cost."""
    run_dir = scratch / f"alpha-{alpha}"
    events: list[LoggedEvent] = []
    prepared = prepare_run(load_config(configuration(args, model, alpha, run_dir)))
    with open_run_directory(prepared) as directory, Utilisation(args.device) as busy:
        summary = asyncio.run(run_training(prepared, directory, sinks=[events.append, busy.clock]))
    if not summary.finished:
        raise RuntimeError(f"α = {alpha} ended early: {summary.reason}")
    begins = {event.data["trained"] + 1: event.time_s for event in events if event.kind == "step.begin"}
    ends = {event.data["trained"]: event for event in events if event.kind == "step.end"}
    first, last = args.warmup, args.warmup + args.steps
    window = [ends[step] for step in range(first + 1, last + 1)]
    span_s = ends[last].time_s - ends[first].time_s
    loads = measure_spans(events, "load")
    return {
        "alpha": alpha,
        "step_s": span_s / args.steps,
        "train_s": sum(ends[step].time_s - begins[step] for step in range(first + 1, last + 1)) / args.steps,
        "samples_per_s": sum(event.data["samples"] for event in window) / span_s,
        "tokens_per_s": sum(event.data["actions"] for event in window) / span_s,
        "update_s": statistics.median(loads) if loads else 0.0,  # the first one waits for the engine to start
        "lag": sum(event.data["train/lag_mean"] for event in window) / args.steps,
        "busy": busy.between(ends[first].time_s, ends[last].time_s),
    }


class Utilisation:
    """How busy the GPU is, on the clock of the run's events."""

    def __init__(self, device: str) -> None:
        self._watcher = None if device == "cpu" else subprocess.Popen(WATCH, stdout=subprocess.PIPE, text=True)
        self._looks: list[tuple[float, float]] = []
        self._offset = 0.0

    def __enter__(self) -> Utilisation:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._watcher is not None:
            self._watcher.kill()

    def clock(self, event: LoggedEvent) -> None:
        """Learn by how much that clock differs from ours."""
        self._offset = event.time_s - time.monotonic()

    def _look(self) -> None:
        if self._watcher is not None and self._watcher.stdout is not None:
            for line in self._watcher.stdout:
                self._looks.append((time.monotonic(), float(line) / 100))

    def between(self, first_s: float, last_s: float) -> float:
        """The mean share."""
        inside = [share for at, share in self._looks if first_s <= at + self._offset <= last_s]
        return sum(inside) / len(inside) if inside else float("nan")


def measure_spans(events: list[LoggedEvent], name: str) -> list[float]:
    """Return the seconds of all spans whose names begin so; every part of a run numbers its own spans."""
    begun: dict[tuple[str, int], float] = {}
    found = []
    for event in events:
        if event.kind == "span.begin" and event.data["name"].startswith(name):
            begun[event.who, event.data["span"]] = event.time_s
        elif event.kind == "span.end" and (at := (event.who, event.data["span"])) in begun:
            found.append(event.time_s - begun.pop(at))
    return found


def main() -> None:
    """Run, print one table."""
    args = arguments()
    scratch = Path(tempfile.mkdtemp(prefix="headway-end-to-end-"))
    rows = []
    try:
        model = make_model(scratch / "model", args)
        for alpha in args.alpha:
            rows.append(measured(args, model, alpha, scratch))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show(args, rows)


def show(args: argparse.Namespace, rows: list[dict[str, float]]) -> None:
    """The table, with ratios to the first row."""
    length = f"≤ {args.length}, {args.mean_length} on average" if args.mean_length else args.length
    what = f"{args.shape}, {args.prompts} × {args.group} × {length} tokens, reward after {args.reward_s} s"
    table = Table(
        "α",
        "s/step",
        "train s",
        "samples/s",
        "tokens/s",
        "update s",
        "lag",
        "GPU",
        "speed",
        title=f"{what}, {machine()}",
    )
    for row in rows:
        numbers = [f"{row[key]:,.2f}" for key in ("step_s", "train_s", "samples_per_s")]
        numbers += [f"{row['tokens_per_s']:,.0f}", f"{row['update_s']:.3f}", f"{row['lag']:.2f}", f"{row['busy']:.0%}"]
        table.add_row(f"{row['alpha']:g}", *numbers, f"{rows[0]['step_s'] / row['step_s']:.2f}×")
    Console(width=140).print(table)


def machine() -> str:
    """Chip and commit."""
    import torch

    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return f"{chip}, torch {torch.__version__}, commit {done.stdout.strip() or 'unknown'}"


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES | LARGE_SHAPES, default="0.5B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--alpha", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--mean-length", type=int, default=0, help="answers end by themselves, after so many on average"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3, help="the third step may still compile a kernel")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--reward-s", type=float, default=0.0)
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank instead of the weights")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
