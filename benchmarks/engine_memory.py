"""Memory of the native engine on a GPU: awake, while a version arrives, and asleep, with two sets of weights and one.

    python benchmarks/engine_memory.py                   # one GPU, which nobody else needs to leave alone
    python benchmarks/engine_memory.py --device cpu      # does it run? All sizes are 0

A line for each engine. Allocated is what tensors hold; reserved is what other programs cannot have. A second update
follows the first, so that what an engine makes only once is part of no difference. Below are the lines of code that
made what was allocated, at the peak of each update and asleep, and segments of which a part is in use.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.engines.factory import make_model, request, serve, together

from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings

MIB = 1 << 20
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
SMALL = {"hidden_size": 64, "num_hidden_layers": 1}


def read_memory() -> str:
    """Return what this process has of the card."""
    if not torch.cuda.is_available():
        return "0 allocated, 0 reserved"
    return f"{torch.cuda.memory_allocated() / MIB:.0f} allocated, {torch.cuda.memory_reserved() / MIB:.0f} reserved"


def name_origin(frames: list[dict[str, Any]]) -> str:
    """Return the innermost lines of this project that allocated something."""
    ours = [frame for frame in frames if "headway" in frame["filename"] or "tests" in frame["filename"]] or frames
    return " < ".join(f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in ours[:3])


def print_origins(sizes: Counter[str]) -> None:
    """Print who holds most."""
    for origin, size in sizes.most_common(8):
        if size >= MIB:
            print(f"      {size / MIB:.0f} MiB: {origin}", flush=True)


def explain_peak() -> None:
    """Print what was allocated when most was, of that which was made since history is recorded."""
    if not torch.cuda.is_available():
        return
    alive: dict[int, tuple[int, str]] = {}
    total = most = 0
    at_most: Counter[str] = Counter()
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry["size"], name_origin(entry["frames"])
            total += entry["size"]
            if total > most + MIB:
                most, at_most = total, Counter()
                for size, origin in alive.values():
                    at_most[origin] += size
        elif entry["action"] == "free_completed" and entry["addr"] in alive:
            total -= alive.pop(entry["addr"])[0]
    print(f"    at the peak of this update, {most / MIB:.0f} MiB were new:", flush=True)
    print_origins(at_most)


def explain_rest() -> None:
    """Print what is allocated, and the sizes of segments that it keeps from being freed."""
    if not torch.cuda.is_available():
        return
    sizes: Counter[str] = Counter()
    segments = torch.cuda.memory._snapshot()["segments"]
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                sizes[f"{block['state']} {name_origin(block.get('frames') or [])}"] += block["size"]
    kept = [f"{one['allocated_size'] / MIB:.1f} of {one['total_size'] / MIB:.0f}" for one in segments]
    print(f"    segments, MiB in use: {', '.join(kept)}; allocated by:", flush=True)
    print_origins(sizes)


def record_history() -> None:
    """Record who allocates from now on."""
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=200_000, clear_history=True)


async def measure(device: str, *, spare: bool, checks: bool) -> None:
    """Build an engine, update it twice, and let it sleep."""
    shape = {**(SHAPE if device == "cuda" else SMALL), "vocab_size": 32000, "max_position_embeddings": 2048}
    models = [make_model("qwen2", seed=seed, **shape) for seed in range(2)]
    settings = NativeSettings(
        slots=256 if device == "cuda" else 2,
        slot_tokens=2048 if device == "cuda" else 64,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        kv_cache_bytes=512 * MIB,
        host_cache_bytes=0,
        spare_weights=spare,
    )
    engine = NativeEngine("engine", lambda: make_model("qwen2", **shape), settings, checks=checks)
    weights = sum(one.numel() * 2 for one in models[0].parameters()) / MIB
    kind = f"{'two sets' if spare else 'one set'}{', checksums' if checks else ''}"
    print(f"{kind}: MiB; weights {weights:.0f}, cache 512; before {read_memory()}", flush=True)
    for version in range(3):
        record_history()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        await serve(engine, models[version % 2], version, bucket_bytes=32 * MIB, dtype=torch.bfloat16)
        peak = torch.cuda.max_memory_allocated() / MIB if torch.cuda.is_available() else 0
        print(f"  version {version} has arrived: {read_memory()}, {peak:.0f} at most", flush=True)
        explain_peak()
        await together(engine, [request(f"a{version}", [1, 2, 3], count=16)])
        print(f"  answered: {read_memory()}", flush=True)
    await engine.pause()
    await engine.sleep()
    print(f"  asleep: {read_memory()}", flush=True)
    explain_rest()
    await engine.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"  closed: {read_memory()}", flush=True)
    explain_rest()


def main() -> None:
    """Measure each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    device = parser.parse_args().device
    for spare, checks in ((True, False), (False, False), (False, True)):
        asyncio.run(measure(device, spare=spare, checks=checks))


if __name__ == "__main__":
    main()
