"""How long decoding stands still for other weights, by the clock of the GPU.

    python benchmarks/flip_gpu.py [--shape 0.5B] [--requests 256]

A trainer's store on the device, its receiver, an engine in the midst of requests: everything as in a run. Marks are set
on the engine's stream where a block of steps begins and ends; what lies between the end of one and the beginning of the
next is time in which nothing is decoded. Blocks with a flip between them are shown beside the others.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from end_to_end import SHAPES, machine
from headway.engines.base import Progress, Request
from headway.engines.native.native_core import make_block_core
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings
from headway.types import SamplingParams
from headway.weights.device_memory import DeviceArena
from headway.weights.weight_store import WeightStore

PROMPT, LENGTH, FLIPS = 64, 768, 4


class Marks:
    """Begin and end of every block, and whether other weights came before it."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Any, Any, bool]] = []
        self._flipped = False

    def make_core(self, *parts: Any) -> Any:
        """The engine's own assembly, with marks around its blocks."""
        parameters, core = make_block_core(*parts)
        runner: Any = core._runner  # type: ignore[attr-defined]
        decode, install = runner._decode, runner.install

        def marked(ready: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            flight = decode(ready)
            end.record()
            self.blocks.append((begin, end, self._flipped))
            self._flipped = False
            return flight

        def installed(values: Any) -> None:
            install(values)
            self._flipped = True

        runner._decode, core._install = marked, installed
        return parameters, core

    def gaps(self) -> tuple[list[float], list[float]]:
        """Milliseconds between blocks: usually, and with a flip."""
        found: tuple[list[float], list[float]] = ([], [])
        for (_, end, _), (begin, _, flipped) in zip(self.blocks, self.blocks[1:], strict=False):
            found[flipped].append(end.elapsed_time(begin))
        return found


async def main() -> None:
    """One engine, some flips, one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--requests", type=int, default=256)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=151_936, num_key_value_heads=2, tie_word_embeddings=True, **SHAPES[args.shape])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    marks, store = Marks(), WeightStore(arena=DeviceArena("cuda"))
    settings = NativeSettings(
        slots=args.requests, slot_tokens=PROMPT + LENGTH, device="cuda", dtype="bfloat16", threads=1
    )
    engine = NativeEngine("engine/0", lambda: deepcopy(model), settings, eos=[], make_core=marks.make_core)

    async def update(version: int) -> None:
        store.publish(version, dict(model.named_parameters()))
        manifest, buckets = await store.gather(version)
        await engine.receiver.begin(manifest)
        async for bucket in buckets:
            await engine.receiver.load(bucket)
        await engine.receiver.flip()

    async def answers(name: str) -> list[Progress]:
        parts = [Progress() for _ in range(args.requests)]
        params = SamplingParams(max_new_tokens=LENGTH)
        asked = [
            Request(request_id=f"{name}{i}", session=str(i), prompt=[5 + i % 97] * PROMPT, params=params)
            for i in range(args.requests)
        ]
        await asyncio.gather(*(engine.generate(one, part) for one, part in zip(asked, parts, strict=True)))
        return parts

    await update(0)
    await answers("first")  # compiles, captures
    marks.blocks.clear()
    running = asyncio.create_task(answers("then"))
    for version in range(1, FLIPS + 1):
        await asyncio.sleep(0.25)
        await update(version)
    parts = await running
    torch.cuda.synchronize()
    usual, flipped = marks.gaps()
    versions = sorted({run.version for part in parts for run in part.runs})
    print(f"{args.shape}, {args.requests} requests of {LENGTH} tokens, {machine()}; tokens of versions {versions}")
    print(f"between blocks: usually {statistics.median(usual):.2f} ms (largest {max(usual):.2f})")
    print(f"with other weights: {', '.join(f'{gap:.2f}' for gap in flipped)} ms")
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
