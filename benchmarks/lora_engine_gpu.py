"""What adapters cost an engine on one GPU: added at every product, or merged into whole weights beforehand.

    python benchmarks/lora_engine_gpu.py                                   # 7B, a minute on an H200
    python benchmarks/lora_engine_gpu.py --device cpu --shape tiny --requests 4 --tokens 8      # does it run?

Random weights of the shape of Qwen2.5-7B with random adapters of rank 32. For both ways: bytes of a version, seconds
from publishing to serving it, tokens a second, GPU memory, and how far log-probabilities are from the trainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from end_to_end import machine
from headway.algorithms.advantages import AdvantageSettings
from headway.engines.base import Progress, Request
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import AdapterSettings, NativeSettings
from headway.models.frozen_base import FrozenBase
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.settings import LocalSettings, LoraSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import pack_rows
from headway.types import SamplingParams
from headway.weights.device_memory import DeviceArena
from headway.weights.weight_store import WeightStore
from lora_gpu import Row, model_of

RANK, ALPHA, PROMPT = 32, 64.0, 32


def make_learner(args: argparse.Namespace, base: FrozenBase, *, separate: bool) -> LocalLearner:
    """A trainer whose adapters change the model."""
    model = base.adopt(model_of(Row(shape=args.shape), args))
    learner = LocalLearner(
        model,
        LocalSettings(
            advantages=AdvantageSettings(),
            lora=LoraSettings(rank=RANK, alpha=ALPHA, separate=separate),
            precision="bf16" if args.device == "cuda" else "fp32",
            device=args.device,
        ),
    )
    dice = torch.Generator(args.device).manual_seed(0)
    for name, one in learner.policy.trainable().items():
        if "lora_B" in name:
            one.data.copy_(torch.randn(one.shape, generator=dice, device=one.device) * 0.01)
    return learner


async def serve(engine: NativeEngine, store: WeightStore, learner: LocalLearner, version: int) -> tuple[int, float]:
    """Publish and serve; returns bytes and seconds."""
    began = time.perf_counter()
    store.publish(version, learner.published_weights())
    manifest, buckets = await store.gather(version)
    await engine.receiver.begin(manifest)
    async for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()
    return manifest.total_bytes, time.perf_counter() - began


async def generate(engine: NativeEngine, args: argparse.Namespace, name: str) -> list[tuple[Request, Progress]]:
    """Answer all requests together."""
    dice = torch.Generator().manual_seed(0)
    asked = [
        Request(
            request_id=f"{name}.{number}",
            session=f"{name}.{number}",
            prompt=torch.randint(1000, (PROMPT,), generator=dice).tolist(),
            params=SamplingParams(max_new_tokens=args.tokens),
            prefix_key=-1,
        )
        for number in range(args.requests)
    ]
    made = [Progress() for _ in asked]
    await asyncio.gather(*(engine.generate(one, progress) for one, progress in zip(asked, made, strict=True)))
    return list(zip(asked, made, strict=True))


def differences(learner: LocalLearner, made: list[tuple[Request, Progress]], device: str) -> torch.Tensor:
    """Log-probabilities of the engine minus those of the trainer."""
    rows, first = [], 0
    for asked, progress in made[:8]:
        tokens = (*asked.prompt, *progress.actions)
        rows.append(
            TokenRow(
                sample_id=str(first), group=first, tokens=tokens, actions=tuple(range(PROMPT, len(tokens))), first=first
            )
        )
        first += len(progress.actions)
    found = torch.zeros(first)
    with torch.no_grad():
        for pack in pack_rows(rows, budget=8192, device=device):
            found[pack.action_N.cpu()] = learner.policy.logps(pack).logp_N.float().cpu()
    return torch.tensor([logp for _, progress in made[:8] for logp in progress.logps]) - found


async def measure(args: argparse.Namespace, *, separate: bool) -> dict[str, Any]:
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    base = FrozenBase(args.device, dtype)
    learner = make_learner(args, base, separate=separate)
    config = learner.policy.causal.config
    adapters = AdapterSettings(rank=RANK, scale=ALPHA / RANK, load_base=base.read) if separate else None
    settings = NativeSettings(
        slots=args.requests,
        slot_tokens=PROMPT + args.tokens,
        device=args.device,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        adapters=adapters,
    )

    def architecture() -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in config.to_dict().items() if k != "model_type"}))
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        return model.eval()

    engine = NativeEngine("engine/0", architecture, settings, eos=[])
    store = WeightStore(wire_dtype=dtype, arena=DeviceArena(args.device))
    await serve(engine, store, learner, 0)
    await generate(engine, args, "warm")
    size, flip_s = await serve(engine, store, learner, 1)
    began = time.perf_counter()
    made = await generate(engine, args, "timed")
    seconds = time.perf_counter() - began
    away = differences(learner, made, args.device)
    gb = torch.cuda.memory_allocated() / 1e9 if args.device == "cuda" else float("nan")
    await engine.close()
    store.close()
    return {
        "way": "adapters alone" if separate else "merged",
        "version_mb": size / 1e6,
        "publish_to_serve_s": flip_s,
        "tokens_s": args.requests * args.tokens / seconds,
        "logp_difference_mean": float(away.abs().mean()),
        "logp_difference_max": float(away.abs().max()),
        "logp_difference_bias": float(away.mean()),
        "gb": gb,
    }


def main() -> None:
    """Measure both ways, print one line for each."""
    args = arguments()
    print(machine(), vars(SimpleNamespace(**{k: str(v) for k, v in vars(args).items()})))
    for separate in (True, False):
        row = asyncio.run(measure(args, separate=separate))
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=("tiny", "7b"), default="7b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
