"""What a training step costs on one GPU: seconds, tokens a second, memory, and the share of the chip's peak (MFU).

    python benchmarks/trainer_gpu.py                          # 0.5B and 1.5B, answers of 512, 4k, 16k and 64k tokens
    python benchmarks/trainer_gpu.py --shapes 0.5B --lengths 512 --pack 18432 36864 --profile
    python benchmarks/trainer_gpu.py --shapes 0.5B --lengths 131072 --tokens 262144 --activations recomputed offloaded
    python benchmarks/trainer_gpu.py --device cpu --shapes tiny --lengths 8 64 --tokens 128 --pack 72     # does it run?

Random weights of the shape of Qwen2.5 (0.6B: of Qwen3, whose heads are twice as wide), groups of at most eight answers
of equal length to one prompt, one optimizer step a batch. MFU counts what mathematics needs: six operations for each
weight and trained token, and those of causal attention, whatever is recomputed; the peak is that of dense bf16. The
second figure counts attention as if every token saw the whole sequence, which is the convention of torchtitan.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import end_to_end
from end_to_end import machine
from headway.algorithms.advantages import AdvantageSettings
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.policy_model import peak_tflops
from headway.trainers.local.settings import LocalSettings
from headway.types import Batch, Episode, FinishReason, Generation, Sample, SampleGroup, Score, Task, Turn, VersionRun
from headway.weights.device_memory import DeviceArena
from headway.weights.weight_store import WeightStore

SHAPES: dict[str, dict[str, int]] = {
    **end_to_end.SHAPES,
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
VOCABULARY = 151_936
PROMPT = 64


def model_of(shape: str, device: str) -> Any:
    """Random, in the precision that weights are stored in."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

    torch.manual_seed(0)
    make_config = Qwen3Config if "head_dim" in SHAPES[shape] else Qwen2Config
    config = make_config(
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=2**18,
        **({"num_key_value_heads": 2} | SHAPES[shape]),
    )
    with torch.device(device):
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


def operations(model: Any, tokens: float, prompts: int, group: int, length: int, *, causal: bool = True) -> float:
    """Of one step: forward, and backward at twice its price."""
    config = model.config
    weights = sum(one.numel() for one in model.parameters())  # tied: the embedding is the head
    keys = PROMPT + (length / 2 if causal else length)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = 4 * config.num_hidden_layers * width * keys * prompts * group * length
    return 3 * (2 * weights * tokens + attention)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    shape: str
    length: int
    activations: str
    pack: int
    prompts: int
    group: int

    @classmethod
    def of(cls, shape: str, length: int, activations: str, pack: int, tokens: int) -> Case:
        """Make groups of eight, or of as many as `tokens` allow, but of two at least."""
        group = max(2, min(8, tokens // length))
        return cls(shape, length, activations, pack, max(1, tokens // (group * length)), group)


async def measured(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps after the first ones."""
    settings = LocalSettings(
        advantages=AdvantageSettings(),
        precision="bf16" if args.device == "cuda" else "fp32",
        device=args.device,
        micro_batch_tokens=case.pack,
        gradient_checkpointing=case.activations != "kept",
        activation_offload=case.activations == "offloaded",
        fused_layers=not args.plain,
    )
    store = WeightStore(wire_dtype=torch.bfloat16, arena=DeviceArena(args.device))
    trainer = LocalTrainer(lambda: model_of(case.shape, args.device), settings, store)
    work = (case.prompts, case.group, case.length)
    batches = [batch_of(version, *work) for version in range(args.warmup + args.steps + args.profile)]
    for batch in batches[: args.warmup]:
        await trainer.train(batch)
    gc.collect()
    gc.freeze()  # as a run does: a full collection would visit all that was imported
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times_s = []
    for batch in batches[args.warmup : args.warmup + args.steps]:
        began = time.perf_counter()
        metrics = await trainer.train(batch)
        times_s.append(time.perf_counter() - began)
    step_s = sum(times_s) / args.steps
    gb = torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else float("nan")
    if args.profile:
        await _profile(trainer, batches[-1], args)
    model, tokens = trainer.learner.policy.causal, metrics["packed_tokens"]
    needed, uncut = (operations(model, tokens, *work, causal=causal) for causal in (True, False))
    peak = 1e12 * (peak_tflops(args.device) or float("nan"))
    policy = trainer.learner.policy.activations
    await trainer.close()
    return {
        **asdict(case),
        "activations": "offloaded" if policy.offload else "recomputed" if policy.recompute else "kept",
        "step_s": step_s,
        "steps_s": [round(one, 3) for one in times_s],
        "samples": case.prompts * case.group / step_s,
        "tokens": metrics["tokens"] / step_s,
        "tflops": needed / step_s / 1e12,
        "mfu": needed / step_s / peak,
        "mfu_uncut": uncut / step_s / peak,
        "gb": gb,
        "pack_tokens": metrics["micro_batch_tokens"],
    }


async def _profile(trainer: LocalTrainer, batch: Batch, args: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    on_gpu = args.device == "cuda"
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        await trainer.train(batch)
    print(f"{time.perf_counter() - began:.3f} s with the profiler")
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    spans = [(one.time_range.start, one.time_range.end, one.name) for one in found.events() if one.device_type == kind]
    if spans:
        show_kernels(spans)
    else:  # the work of another thread on a CPU, for instance
        print(found.key_averages().table(row_limit=40, max_name_column_width=70))


def show_kernels(spans: list[tuple[float, float, str]], rows: int = 45) -> None:
    """Print what kernels cost by name, how long none ran, and between which kernels, from (begin, end, name) in µs."""
    spans.sort()
    by_name: dict[str, list[float]] = {}
    for begin, end, name in spans:
        by_name.setdefault(name, []).append(end - begin)
    gaps, busy_until, before = [], spans[0][0], "the begin"
    for begin, end, name in spans:
        if begin > busy_until:
            gaps.append((begin - busy_until, busy_until - spans[0][0], before, name))
        if end > busy_until:
            busy_until, before = end, name
    idle, span = sum(gap[0] for gap in gaps), busy_until - spans[0][0]
    print(f"{len(spans)} kernels and copies in {span / 1e3:.1f} ms, none of them running for {idle / 1e3:.1f} ms")
    for low, high in ((0, 5), (5, 20), (20, 100), (100, 1000), (1000, 1e9)):
        some = [gap[0] for gap in gaps if low <= gap[0] < high]
        print(f"  gaps of {low} to {high:g} us: {len(some)}, together {sum(some) / 1e3:.1f} ms")
    for gap, at, first, second in sorted(gaps, reverse=True)[:12]:
        print(f"  {gap / 1e3:8.2f} ms at {at / 1e3:8.1f} ms, between {first[:60]} and {second[:60]}")
    for name, times in sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:rows]:
        print(f"  {sum(times) / 1e3:8.2f} ms {len(times):6d} x {sum(times) / len(times):9.1f} us  {name[:150]}")


def main() -> None:
    """Run, print one table."""
    args = arguments()
    table = Table(
        "shape", "tokens", "samples", "activations", "s/step", "samples/s", "tokens/s", "TFLOP/s", "MFU", "uncut", "GB",
        title=f"packs of {', '.join(f'{pack:,}' for pack in args.pack)} tokens, {machine()}",
    )  # fmt: skip
    cases = [
        Case.of(shape, length, activations, pack, args.tokens)
        for shape in args.shapes
        for length in args.lengths
        for activations in args.activations
        for pack in args.pack
    ]
    for case in cases:
        try:
            row = asyncio.run(measured(case, args))
        except Exception as error:
            row = {**asdict(case), "error": f"{type(error).__name__}: {error}"[:200]}
        if args.out:
            with args.out.open("a") as file:
                print(json.dumps(row), file=file)
        table.add_row(*cells(row))
        gc.unfreeze()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    Console(width=130).print(table)


def cells(row: dict[str, Any]) -> list[str]:
    """The texts of one row."""
    samples = f"{row['prompts']} × {row['group']}"
    first = [row["shape"], f"{row['length']:,}", samples, row["activations"]]
    if "error" in row:
        return [*first, row["error"]]
    numbers = [f"{row['step_s']:.2f}", f"{row['samples']:.1f}", f"{row['tokens']:,.0f}", f"{row['tflops']:.0f}"]
    shares = [f"{row[name]:.1%}" if row[name] == row[name] else "" for name in ("mfu", "mfu_uncut")]
    return [*first, *numbers, *shares, f"{row['gb']:.0f}"]


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["0.5B", "1.5B"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384, 65536])
    parser.add_argument(
        "--activations",
        nargs="+",
        choices=("kept", "recomputed", "offloaded"),
        default=["kept", "recomputed"],
        help="whether activations stay on the device; recomputed where memory does not suffice",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, default=2**17, help="of all answers of a step")
    parser.add_argument(
        "--pack",
        type=int,
        nargs="+",
        default=[32 * (PROMPT + 512)],
        help="tokens of one pass; a longer answer is one; several give a row each",
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="layers as transformers computes them")
    parser.add_argument("--profile", action="store_true", help="print where the time of one more step goes")
    parser.add_argument("--out", type=Path, help="a file that gets every row as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
