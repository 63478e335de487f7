"""Memory of the native engine on a GPU: awake, while a version arrives, and asleep, with two sets of weights and one.

    python benchmarks/engine_memory.py                   # one GPU, which nobody else needs to leave alone
    python benchmarks/engine_memory.py --device cpu      # does it run? All sizes are 0

A line for each engine. Allocated is what tensors hold; reserved is what other programs cannot have. A second update
follows the first, so that what an engine makes only once is part of no difference.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from pathlib import Path

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


async def measure(device: str, *, spare: bool) -> None:
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
    engine = NativeEngine("engine", lambda: make_model("qwen2", **shape), settings)
    weights = sum(one.numel() * 2 for one in models[0].parameters()) / MIB
    print(
        f"{'two sets' if spare else 'one set'}: MiB; weights {weights:.0f}, cache 512; before {read_memory()}",
        flush=True,
    )
    for version in range(3):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        await serve(engine, models[version % 2], version, bucket_bytes=32 * MIB, dtype=torch.bfloat16)
        peak = torch.cuda.max_memory_allocated() / MIB if torch.cuda.is_available() else 0
        print(f"  version {version} has arrived: {read_memory()}, {peak:.0f} at most", flush=True)
        await together(engine, [request(f"a{version}", [1, 2, 3], count=16)])
        print(f"  answered: {read_memory()}", flush=True)
    await engine.pause()
    await engine.sleep()
    print(f"  asleep: {read_memory()}", flush=True)
    await engine.close()
    gc.collect()
    print(f"  closed: {read_memory()}", flush=True)


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    device = parser.parse_args().device
    for spare in (True, False):
        asyncio.run(measure(device, spare=spare))


if __name__ == "__main__":
    main()
