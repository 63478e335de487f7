"""Who pays for a straggler? Real runs: seconds per step, lag, length bias and time to reward of each staleness policy.

    python benchmarks/stragglers.py --device cuda --out stragglers.jsonl                      # one GPU, 25M parameters
    python benchmarks/stragglers.py --device cpu --shape tiny --median 8 --prompts 4 --steps 8 --cells 0 1:wait 1:drop

The task has a long tail that matters. A prompt is one of 24 letters. Each letter has a length, a quantile of a
log-normal distribution (σ = 1.3, so that the longest is seven times the mean), and a symbol out of four that it wants.
A model is first trained to answer with symbols drawn by lot, every second one a symbol that the letter does not want,
and never to end, so that an answer is as long as the environment of its letter allows. The reward is the share of
wanted symbols. Which symbol a letter wants is learned from answers to that letter alone: a policy that drops long
answers learns the long letters late or never.

*Reward* is the mean over the letters of the newest reward of each, so that it does not depend on which letters are
trained more often; *to goal* is when its mean over five steps gets there. *Held out* is the last policy's reward on all
letters. *Bias* is what the run reports: length of trained answers against started ones. Cells are `α:policy` or
`α:policy:order`. Seconds per step leave out the first two steps and the last ones, which start nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import platform
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.config import load_config
from headway.environments.text_environment import Reply
from headway.launch.training_session import open_run_directory, prepare_run, run_training
from headway.monitor.event_log import LoggedEvent

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4},
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
}
LETTERS, SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWX", "wxyz"
SIGMA = 1.3
CELLS = ("1:wait", "1:drop", "0", "2:wait", "2:drop", "0.5:wait", "1.25:wait", "1:window", "2:drop:freshest")
WARMUP = 2
GOAL = 0.5
COLUMNS = {
    "step_s": ".3f",
    "lag": ".2f",
    "length": ".0f",
    "bias": "+.1%",
    "dropped": ",.0f",
    "to_goal_s": ".1f",
    "reward": ".2f",
    "held_out": ".2f",
}
"""What the table shows of each cell, and how."""


class WantedSymbol:
    """An environment of one turn: shows its letter, and rewards the share of the symbol that it wants."""

    max_steps = 1

    def __init__(self, letter: str, wanted: str) -> None:
        self.letter, self.wanted = letter, wanted

    def reset(self, seed: int, data: Any) -> str:
        return self.letter

    def step(self, action: str) -> Reply:
        return Reply("", reward=action.count(self.wanted) / max(len(action), 1), done=True)


def get_lengths(median: int) -> list[int]:
    """Return the length of each letter's answers."""
    quantiles = [NormalDist().inv_cdf((place + 0.5) / len(LETTERS)) for place in range(len(LETTERS))]
    return [max(1, round(median * math.exp(SIGMA * quantile))) for quantile in quantiles]


def make_model(directory: Path, args: argparse.Namespace) -> None:
    """Make a model that prefers another symbol than the wanted one for each letter and never ends an answer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from headway.models.tiny_model import make_character_tokenizer

    tokenizer = make_character_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=2 * max(get_lengths(args.median)),
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SHAPES[args.shape],
    )
    model = Qwen2ForCausalLM(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    rng = random.Random(0)
    for _ in range(args.pretraining_steps):
        rows = [_draw_chat(rng, tokenizer) for _ in range(64)]
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


def _draw_chat(rng: random.Random, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt with the beginning of an answer, and the labels, which are those of the answer."""
    place = rng.randrange(len(LETTERS))
    chat = [{"role": "user", "content": LETTERS[place]}]
    weights = [3 if index == (place + 1) % len(SYMBOLS) else 1 for index in range(len(SYMBOLS))]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode("".join(rng.choices(SYMBOLS, weights, k=64)), add_special_tokens=False)
    return [*prompt, *answer], [-100] * len(prompt) + answer


def make_configuration(args: argparse.Namespace, cell: str, seed: int, model: Path, run_dir: Path) -> dict[str, Any]:
    """Return the configuration of one cell; only α and the policy differ between cells."""
    alpha, _, policy = cell.partition(":")
    policy, _, order = (policy or "wait").partition(":")
    return {
        "exp_name": cell,
        "seed": seed,
        "output_dir": str(run_dir),
        "pretrain": str(model),
        "device": args.device,
        "processes": args.processes,
        "async_generation_ratio": float(alpha),
        "staleness_policy": policy,
        "selection_order": order or "oldest",
        "pg_variant": "tis",
        "adv_estimator": "grpo",
        "filter_zero_variance": False,
        "rollout_batch_size": args.prompts * args.group,
        "prompt_length": 16,
        "response_length": max(get_lengths(args.median)),
        "max_steps": args.steps,
        "save_steps": 0,
        "eval_steps": args.steps,
        "eval_at_start": False,
        "track_with": [],
        "actor_train": {
            "model_args": {"disable_gradient_checkpointing": True},
            "training_args": {"learning_rate": args.learning_rate, "per_device_train_batch_size": args.group},
        },
        "val_batch_size": 2 * len(LETTERS),
        "train_env_manager": {"tags": list(LETTERS), "group_size": args.group},
        "custom_envs": {
            letter: {
                "env_type": f"{Path(__file__).resolve()}:WantedSymbol",
                "workers": 0,  # a process for each letter would take most of a short run to start
                "max_tokens_per_step": length,
                "env_config": {"letter": letter, "wanted": SYMBOLS[place % len(SYMBOLS)]},
            }
            for place, (letter, length) in enumerate(zip(LETTERS, get_lengths(args.median), strict=True))
        },
    }


def run_cell(args: argparse.Namespace, cell: str, seed: int, model: Path, scratch: Path) -> dict[str, Any]:
    """Train one cell with one seed and return its numbers."""
    run_dir = scratch / f"{cell.replace(':', '-')}-{seed}"
    events: list[LoggedEvent] = []
    prepared = prepare_run(load_config(make_configuration(args, cell, seed, model, run_dir)))
    with open_run_directory(prepared) as directory:
        summary = asyncio.run(run_training(prepared, directory, sinks=[events.append]))
    if not summary.finished:
        raise RuntimeError(f"{cell}, seed {seed} ended early: {summary.reason}")
    tasks = prepared.sources.train
    return {"cell": cell, "seed": seed, **measure(events, lambda position: getattr(tasks.task(position), "domain", ""))}


def measure(events: list[LoggedEvent], get_letter: Callable[[int], str]) -> dict[str, Any]:
    """Return the numbers of a run from its events."""
    ends = [event for event in events if event.kind == "step.end"]
    served_s = next(event.time_s for event in events if event.kind == "served")
    lags = [event.data["trained"] - event.data["oldest"] for event in events if event.kind == "group.train"]
    curve = make_reward_curve(events, served_s, get_letter)
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


def make_reward_curve(
    events: list[LoggedEvent], served_s: float, get_letter: Callable[[int], str]
) -> list[tuple[float, float, float]]:
    """Return for each step its time, the mean over the letters of their newest rewards, and its mean of five steps."""
    position = {event.data["group"]: event.data["position"] for event in events if event.kind == "group.start"}
    newest = dict.fromkeys(LETTERS, 1 / len(SYMBOLS))
    found: list[tuple[float, float, float]] = []
    for event in events:
        if event.kind == "group.ready" and event.data.get("reward") is not None:
            newest[get_letter(position[event.data["group"]])] = event.data["reward"]
        elif event.kind == "step.end":
            reward = mean(newest.values())
            found.append((event.time_s - served_s, reward, mean([reward, *(before for _, before, _ in found[-4:])])))
    return found


def main() -> None:
    """Train every cell, print one table; a signal ends it with the cells that are done."""
    args = read_arguments()
    scratch = Path(tempfile.mkdtemp(prefix="headway-stragglers-"))
    rows: list[dict[str, Any]] = []
    began_s = time.monotonic()
    try:
        make_model(scratch / "model", args)
        if args.warm_up:  # compiles the kernels of the largest number of answers at once
            run_cell(argparse.Namespace(**{**vars(args), "steps": 5}), args.cells[-1], 0, scratch / "model", scratch)
            print(f"{time.monotonic() - began_s:.0f} s: warm", flush=True)
        for seed, cell in itertools.product(args.seeds, args.cells):
            if rows and time.monotonic() - began_s > args.budget_s:
                print(f"{cell}, seed {seed}: left out, {args.budget_s:.0f} s are over", flush=True)
                continue
            try:
                rows.append(run_cell(args, cell, seed, scratch / "model", scratch))
            except RuntimeError as error:
                print(error, flush=True)
                break
            shown = {key: value for key, value in rows[-1].items() if key != "curve"}
            print(f"{time.monotonic() - began_s:.0f} s:", json.dumps(shown), flush=True)
            if args.out:
                args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print_table(args, rows)


def print_table(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print all cells."""
    lengths = get_lengths(args.median)
    what = f"{args.shape}, {args.prompts} × {args.group} answers, {args.steps} steps, "
    what += f"lengths {min(lengths)} to {max(lengths)}, mean {mean(lengths):.0f}"
    columns = ("α:policy", "seeds", "s/step", "lag", "length", "bias", "dropped", f"to {GOAL} s", "reward", "held-out")
    table = Table(*columns, title=f"{what}, {describe_machine()}")
    for cell in dict.fromkeys(row["cell"] for row in rows):
        runs = [row for row in rows if row["cell"] == cell]
        shown = [format_seeds([run[key] for run in runs], form) for key, form in COLUMNS.items()]
        table.add_row(cell, str(len(runs)), *shown)
    Console(width=160).print(table)


def format_seeds(values: list[float | None], form: str) -> str:
    """Return the mean over seeds, and in brackets the least and the greatest where there are several."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    spread = f" ({min(numbers):{form}} to {max(numbers):{form}})" if len(numbers) > 1 else ""
    return f"{mean(numbers):{form}}{spread}"


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
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--median", type=int, default=90, help="median length of an answer in tokens")
    parser.add_argument("--processes", action=argparse.BooleanOptionalAction, help="trainer and engine as processes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", action="store_true", help="first train five steps of the last cell for nothing")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--pretraining-steps", type=int, default=300)
    parser.add_argument("--budget-s", type=float, default=420.0, help="no cell begins after so many seconds")
    parser.add_argument("--out", type=Path, help="where the rows go, one JSON object a line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
