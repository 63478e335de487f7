"""Counts the rows that the denoiser computes for a group, with and without a shared prefix."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from headway.denoising.denoising_engine import DenoisingEngine
from headway.denoising.models.denoiser_storage import open_denoiser
from headway.denoising.settings import DenoisingSettings
from headway.engines.base import Progress, Request
from headway.engines.native.settings import NativeSettings
from headway.types import SamplingParams
from headway.weights.weight_store import WeightStore


def measure_prefix_sharing(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """Return the rows that the denoiser computes for a group and the time per group, without and with sharing."""
    return [asyncio.run(_measure(args, model, share)) for share in (False, True)]


async def _measure(args: argparse.Namespace, model: Path, share: bool) -> dict[str, Any]:
    groups, dtype = 8, "bfloat16" if args.device == "cuda" else "float32"
    settings = NativeSettings(slots=args.slots, device=args.device, dtype=dtype, threads=args.threads)  # type: ignore[arg-type]
    engine = DenoisingEngine("engine/0", lambda: open_denoiser(model), DenoisingSettings(share_prefix=share), settings)
    store = WeightStore(bucket_mb=128, wire_dtype=None)
    store.publish(0, dict(open_denoiser(model).state_dict()))
    manifest, buckets = await store.gather(0)
    await engine.receiver.begin(manifest)
    async for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()

    def request(group: int, member: int) -> Request:
        params = SamplingParams(max_new_tokens=args.denoising_steps)
        name, prompt = f"{group}.{member}", tuple(str(group).encode())
        return Request(request_id=name, session=name, prompt=prompt, params=params, prefix_key=group)

    await engine.generate(request(-1, 0), Progress())
    assert engine.core is not None
    before, began_s = engine.core.runner.calls, time.perf_counter()
    gate = asyncio.Semaphore(args.slots)

    async def one(group: int, member: int) -> None:
        async with gate:
            await engine.generate(request(group, member), Progress())

    await asyncio.gather(*(one(group, member) for group in range(groups) for member in range(args.group)))
    seconds, calls = time.perf_counter() - began_s, engine.core.runner.calls - before
    await engine.close()
    store.close()
    return {"shared": share, "calls": calls / groups, "group_s": seconds / groups}
