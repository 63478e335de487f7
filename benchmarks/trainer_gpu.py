"""What a training step costs on one GPU: seconds, tokens a second, and the share of the chip's peak (MFU).

    python benchmarks/trainer_gpu.py                          # shape of Qwen2.5-0.5B, 32 prompts × 8 × 512 tokens
    python benchmarks/trainer_gpu.py --shape 1.5B --profile
    python benchmarks/trainer_gpu.py --device cpu --shape tiny --prompts 2 --length 8      # does it run at all?

Random weights, answers of equal length, one optimizer step a batch. MFU counts what mathematics needs: six operations
for each weight and trained token and those of attention, whatever is recomputed; the peak is that of dense bf16.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from end_to_end import SHAPES, machine
from headway.algorithms.advantages import AdvantageSettings
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.policy_model import peak_tflops
from headway.trainers.local.settings import LocalSettings
from headway.types import Batch, Episode, FinishReason, Generation, Sample, SampleGroup, Score, Task, Turn, VersionRun
from headway.weights.device_memory import DeviceArena
from headway.weights.weight_store import WeightStore

VOCABULARY = 151_936
PROMPT = 64


def model_of(shape: str) -> Any:
    """Random, in the precision that weights are stored in."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True, **SHAPES[shape])
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def batch_of(trained: int, prompts: int, group: int, length: int) -> Batch:
    """Groups whose members share a prompt."""
    dice = random.Random(trained)

    def sample(name: str, seen: tuple[int, ...], reward: float) -> Sample:
        actions = tuple(dice.choices(range(VOCABULARY), k=length))
        runs = (VersionRun(version=trained, count=length),)
        made = Generation(actions=actions, logps=(-12.0,) * length, runs=runs, finish=FinishReason.LENGTH)
        episode = Episode(sample_id=name, task=Task(position=0), turns=(Turn(observation=seen, generation=made),))
        score = Score(value=reward)
        return Sample(sample_id=name, episode=episode, oldest=trained, newest=trained, actions=length, score=score)

    groups = []
    for number in range(prompts):
        seen = tuple(dice.choices(range(VOCABULARY), k=PROMPT))
        members = tuple(sample(f"{number}.{index}.0", seen, float(index % 2)) for index in range(group))
        groups.append(SampleGroup(group_id=number, task=Task(position=number), samples=members))
    return Batch(trained=trained, groups=tuple(groups))


def operations(model: Any, tokens: float, prompts: int, group: int, length: int) -> float:
    """Of one step: forward, and backward at twice its price."""
    config = model.config
    weights = sum(one.numel() for one in model.parameters())  # tied: the embedding is the head
    keys = PROMPT + length / 2
    attention = 4 * config.num_hidden_layers * config.hidden_size * keys * prompts * group * length
    return 3 * (2 * weights * tokens + attention)


async def measured(args: argparse.Namespace, checkpointing: bool) -> dict[str, float]:
    """Some steps after the first two."""
    settings = LocalSettings(
        advantages=AdvantageSettings(),
        precision="bf16" if args.device == "cuda" else "fp32",
        device=args.device,
        micro_batch_tokens=args.micro_batch * (PROMPT + args.length),
        gradient_checkpointing=checkpointing,
    )
    store = WeightStore(wire_dtype=torch.bfloat16, arena=DeviceArena(args.device))
    trainer = LocalTrainer(lambda: model_of(args.shape), settings, store)
    work = (args.prompts, args.group, args.length)
    batches = [batch_of(version, *work) for version in range(args.steps + 2)]
    for version in range(2):
        await trainer.train(batches[version])
    if args.profile and checkpointing:
        await _profile(trainer, batches[2], args)
        return {}
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for batch in batches[2:]:
        metrics = await trainer.train(batch)
    step_s = (time.perf_counter() - began) / args.steps
    needed = operations(trainer.learner.policy.causal, metrics["packed_tokens"], *work)
    peak = 1e12 * (peak_tflops(args.device) or float("nan"))
    await trainer.close()
    return {
        "step_s": step_s,
        "samples": args.prompts * args.group / step_s,
        "tokens": metrics["tokens"] / step_s,
        "tflops": needed / step_s / 1e12,
        "mfu": needed / step_s / peak,
        "gb": torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else float("nan"),
    }


async def _profile(trainer: LocalTrainer, batch: Batch, args: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if args.device == "cuda" else [])]
    began = time.perf_counter()
    with profile(activities=activities) as found:
        await trainer.train(batch)
    print(f"{time.perf_counter() - began:.2f} s with the profiler")
    key = "self_cuda_time_total" if args.device == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=70))


def main() -> None:
    """Run, print one table."""
    args = arguments()
    table = Table(
        "activations", "s/step", "samples/s", "tokens/s", "TFLOP/s", "MFU", "GB",
        title=f"{args.shape}, {args.prompts} × {args.group} × {args.length} tokens, {machine()}",
    )  # fmt: skip
    for checkpointing in (True, False):
        row = asyncio.run(measured(args, checkpointing))
        if row:
            numbers = [f"{row['step_s']:.2f}", f"{row['samples']:.1f}", f"{row['tokens']:,.0f}", f"{row['tflops']:.0f}"]
            kept = "recomputed" if checkpointing else "kept"
            table.add_row(kept, *numbers, f"{row['mfu']:.0%}" if row["mfu"] == row["mfu"] else "", f"{row['gb']:.0f}")
    Console(width=120).print(table)


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=32, help="samples' worth of tokens in one pass")
    parser.add_argument("--profile", action="store_true", help="where the time of one step goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
