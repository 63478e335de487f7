"""Who pays for a straggler? Real runs: seconds per step, lag, length bias and time to reward of each staleness policy.

    python benchmarks/stragglers.py --device cuda --out stragglers.jsonl          # one GPU, 8 minutes
    python benchmarks/stragglers.py --device cpu --shape tiny --length 96 --prompts 4 --steps 12 --cells 0 1:wait 1:drop

The task has a long tail that matters. A prompt is one of ten letters. Each letter has a length, from 8 tokens to half
of `--length` in equal ratios, and a symbol out of four that it wants. A model is first trained to answer with symbols
drawn by lot and to end after that length on average, so that lengths are geometric with ten different means. The
reward is the share of wanted symbols. Which symbol a letter wants is learned from answers to that letter alone: a
policy that drops long answers learns the long letters late or never.

*Reward* is the mean over the ten letters of the newest reward of each, so that it does not depend on which letters are
trained more often; *to 0.8* is when its mean over ten steps gets there. *Held-out* is the last policy's reward on all
letters. *Bias* is what the run reports: length of trained answers against started ones. Cells are `α:policy` or
`α:policy:order`; the first seconds, until step 2, are left out of seconds per step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.config import load_config
from headway.launch.training_session import open_run_directory, prepare_run, run_training
from headway.monitor.event_log import LoggedEvent

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4},
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
}
LETTERS, SYMBOLS = "abcdefghij", "wxyz"
CELLS = ("0", "0.5:wait", "1:wait", "1:drop", "1:window", "1.25:wait", "2:wait", "2:drop", "2:drop:freshest")
WARMUP = 2
GOAL = 0.8


def share(text: str, task_data: Mapping[str, Any]) -> float:
    """Return the share of the symbols that the letter of the prompt wants."""
    return text.count(task_data["answer"]) / max(len(text), 1)


def get_mean_lengths(longest: int) -> list[float]:
    """Return the mean length of each letter."""
    ratio = (longest / 2 / 8) ** (1 / (len(LETTERS) - 1))
    return [8 * ratio**place for place in range(len(LETTERS))]


def make_model(directory: Path, args: argparse.Namespace) -> None:
    """Make a model whose answers are symbols by lot and as long as the letter says on average."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from headway.models.tiny_model import make_character_tokenizer

    tokenizer = make_character_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=4 * args.length,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SHAPES[args.shape],
    )
    model = Qwen2ForCausalLM(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    rng, lengths = random.Random(0), get_mean_lengths(args.length)
    for _ in range(args.pretraining_steps):
        rows = [_draw_chat(rng, lengths, args.length, tokenizer) for _ in range(64)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows], device=args.device)
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows], device=args.device)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"pretrained: loss {loss.item():.3f}", flush=True)
    model.to(torch.bfloat16 if args.device == "cuda" else torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _draw_chat(rng: random.Random, lengths: list[float], longest: int, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt with an answer, and the labels, which are those of the answer."""
    place = rng.randrange(len(LETTERS))
    length = min(max(round(rng.expovariate(1 / lengths[place])), 1), longest)
    chat = [{"role": "user", "content": LETTERS[place]}]
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    answer = tokenizer.encode("".join(rng.choices(SYMBOLS, k=length)), add_special_tokens=False)
    answer = [*answer, tokenizer.eos_token_id]
    return [*prompt, *answer], [-100] * len(prompt) + answer


def write_data(directory: Path) -> Path:
    """Write the prompts: every letter as often as every other."""
    rows = [{"prompt": letter, "answer": SYMBOLS[place % len(SYMBOLS)]} for place, letter in enumerate(LETTERS)]
    path = directory / "letters.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_configuration(args: argparse.Namespace, cell: str, model: Path, data: Path, run_dir: Path) -> dict[str, Any]:
    """Return the configuration of one cell; only α and the policy differ between cells."""
    alpha, _, policy = cell.partition(":")
    policy, _, order = (policy or "wait").partition(":")
    return {
        "exp_name": cell,
        "output_dir": str(run_dir),
        "pretrain": str(model),
        "device": args.device,
        "processes": False,
        "async_generation_ratio": float(alpha),
        "staleness_policy": policy,
        "selection_order": order or "oldest",
        "pg_variant": "tis",
        "adv_estimator": "grpo",
        "filter_zero_variance": False,
        "rollout_batch_size": args.prompts,
        "num_return_sequences_in_group": args.group,
        "prompt_length": 16,
        "response_length": args.length,
        "max_steps": args.steps,
        "save_steps": 0,
        "eval_steps": args.steps,
        "eval_at_start": False,
        "track_with": [],
        "actor_train": {
            "model_args": {"disable_gradient_checkpointing": True},
            "training_args": {"learning_rate": args.learning_rate, "per_device_train_batch_size": args.group},
            "data_args": {"file_name": str(data), "shuffle": False},
        },
        "validation": {"data_args": {"file_name": str(data)}, "generating_args": {"num_return_sequences": 8}},
        "rewards": {"letters": {"reward_fn": f"{__file__}:share"}},
    }


def run_cell(args: argparse.Namespace, cell: str, model: Path, data: Path, scratch: Path) -> dict[str, Any]:
    """Train one cell and return its numbers."""
    run_dir = scratch / cell.replace(":", "-")
    events: list[LoggedEvent] = []
    prepared = prepare_run(load_config(make_configuration(args, cell, model, data, run_dir)))
    with open_run_directory(prepared) as directory:
        summary = asyncio.run(run_training(prepared, directory, sinks=[events.append]))
    if not summary.finished:
        raise RuntimeError(f"{cell} ended early: {summary.reason}")
    return {"cell": cell, "seed": 0, **measure(events, args)}


def measure(events: list[LoggedEvent], args: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of a run from its events."""
    ends = [event for event in events if event.kind == "step.end"]
    served_s = next(event.time_s for event in events if event.kind == "served")
    lags = [event.data["trained"] - event.data["oldest"] for event in events if event.kind == "group.train"]
    curve = make_reward_curve(events, served_s)
    reached = next((time_s for time_s, _, smooth in curve if smooth >= GOAL), None)
    held_out = [event.data["reward"] for event in events if event.kind == "validate.end"]
    bound = max(lags)
    measured = ends[WARMUP : len(ends) - bound] if len(ends) > WARMUP + bound + 1 else ends
    dropped = sum(event.kind == "sample.end" and event.data["end"] == "dropped" for event in events)
    return {
        "step_s": (measured[-1].time_s - measured[0].time_s) / (len(measured) - 1),
        "total_s": ends[-1].time_s - served_s,
        "lag": mean(lags),
        "lag_max": max(lags),
        "length": mean(event.data["length/trained"] for event in ends),
        "bias": ends[-1].data["bias/length"],
        "dropped": dropped,
        "to_goal_s": reached,
        "reward": curve[-1][2] if curve else None,
        "held_out": held_out[-1] if held_out else None,
        "curve": [[round(time_s, 2), round(reward, 3)] for time_s, reward, _ in curve],
    }


def make_reward_curve(events: list[LoggedEvent], served_s: float) -> list[tuple[float, float, float]]:
    """Return, for each step, its time, the mean over the letters of their newest rewards, and its mean of ten steps."""
    position = {event.data["group"]: event.data["position"] for event in events if event.kind == "group.start"}
    newest = dict.fromkeys(range(len(LETTERS)), 1 / len(SYMBOLS))
    found: list[tuple[float, float, float]] = []
    for event in events:
        if event.kind == "group.ready" and event.data.get("reward") is not None:
            newest[position[event.data["group"]] % len(LETTERS)] = event.data["reward"]
        elif event.kind == "step.end":
            reward = mean(newest.values())
            found.append((event.time_s - served_s, reward, mean([reward, *(before for _, before, _ in found[-9:])])))
    return found


def main() -> None:
    """Train every cell, print one table."""
    args = read_arguments()
    scratch = Path(tempfile.mkdtemp(prefix="headway-stragglers-"))
    rows: list[dict[str, Any]] = []
    began_s = time.monotonic()
    try:
        make_model(scratch / "model", args)
        data = write_data(scratch)
        for cell in args.cells:
            if rows and time.monotonic() - began_s > args.budget_s:
                print(f"{cell}: left out, {args.budget_s:.0f} s are over", flush=True)
                continue
            rows.append(run_cell(args, cell, scratch / "model", data, scratch))
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "curve"}), flush=True)
            if args.out:
                args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print_table(args, rows)


def print_table(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print all cells."""
    what = f"{args.shape}, {args.prompts} × {args.group} × ≤ {args.length} tokens, {args.steps} steps"
    columns = (
        "α:policy",
        "s/step",
        "lag",
        "length",
        "bias",
        "dropped",
        "total s",
        f"to {GOAL} s",
        "reward",
        "held-out",
    )
    table = Table(*columns, title=f"{what}, {describe_machine()}")
    for row in rows:
        reached = "-" if row["to_goal_s"] is None else f"{row['to_goal_s']:.0f}"
        numbers = [f"{row['step_s']:.2f}", f"{row['lag']:.2f}", f"{row['length']:.0f}", f"{row['bias']:+.1%}"]
        ends = [
            f"{row['dropped']:,}",
            f"{row['total_s']:.0f}",
            reached,
            f"{row['reward']:.2f}",
            f"{row['held_out']:.2f}",
        ]
        table.add_row(row["cell"], *numbers, *ends)
    Console(width=140).print(table)


def describe_machine() -> str:
    """Return chip and commit."""
    import torch

    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return f"{chip}, torch {torch.__version__}, commit {done.stdout.strip() or 'unknown'}"


def read_arguments() -> argparse.Namespace:
    """Read what to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="25M")
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--pretraining-steps", type=int, default=300)
    parser.add_argument("--budget-s", type=float, default=420.0, help="no cell begins after so many seconds")
    parser.add_argument("--out", type=Path, help="where the rows go, one JSON object a line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
