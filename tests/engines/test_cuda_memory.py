"""The memory of an engine on a GPU: what a sleep gives back, and what a version needs beside the one it replaces."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings

from .factory import make_model, request, run, serve, together

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
MIB = 1 << 20
CACHE = 512 * MIB


def make_policy(seed: int = 0) -> Any:
    return make_model("qwen2", seed=seed, num_attention_heads=16, **SHAPE)


def make_large_engine(name: str, *, spare: bool) -> NativeEngine:
    settings = NativeSettings(
        slots=256,
        slot_tokens=2048,
        device="cuda",
        dtype="bfloat16",
        kv_cache_bytes=CACHE,
        host_cache_bytes=0,
        spare_weights=spare,
    )
    return NativeEngine(name, make_policy, settings, checks=True)


def count_weight_bytes(model: Any) -> int:
    return 2 * sum(one.numel() for one in model.parameters())


def test_an_engine_asleep_gives_weights_and_cache_back_to_the_card() -> None:
    async def scenario() -> None:
        torch.cuda.init()
        engine, model = make_large_engine("e", spare=False), make_policy()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        await serve(engine, model, 0, bucket_bytes=32 * MIB, dtype=torch.bfloat16)
        await together(engine, [request("a", [1, 2, 3], count=16)])
        awake = torch.cuda.memory_reserved() - before
        await engine.pause()
        await engine.sleep()
        asleep = torch.cuda.memory_reserved() - before
        weights = count_weight_bytes(model)
        print(f"\nweights {weights / MIB:.0f} MiB, awake {awake / MIB:.0f} MiB, asleep {asleep / MIB:.0f} MiB")
        assert awake > weights + CACHE and asleep < 0.1 * awake
        await engine.resume()
        await serve(engine, model, 1, bucket_bytes=32 * MIB, dtype=torch.bfloat16)
        assert len((await together(engine, [request("b", [1, 2, 3], count=16)]))[0].actions) == 16
        await engine.close()

    run(scenario(), 120.0)


def test_a_version_that_replaces_the_served_one_needs_no_second_set_of_weights() -> None:
    async def scenario() -> None:
        models = [make_policy(seed) for seed in range(2)]
        held, peak, sums = {}, {}, set()
        for spare in (True, False):
            engine = make_large_engine(f"e{spare}", spare=spare)
            await serve(engine, models[0], 0, bucket_bytes=32 * MIB, dtype=torch.bfloat16)
            await together(engine, [request("a", [1, 2, 3], count=16)])
            held[spare] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            await serve(engine, models[1], 1, bucket_bytes=32 * MIB, dtype=torch.bfloat16)
            peak[spare] = torch.cuda.max_memory_allocated()
            sums.add(engine._receiver.checksum)  # type: ignore[attr-defined]
            await engine.sleep()
            await engine.close()
            gc.collect()
        weights = count_weight_bytes(models[0])
        told = [f"{size / MIB:.0f}" for size in (weights, held[True], peak[True], held[False], peak[False])]
        print(f"\nMiB: weights {told[0]}; two sets {told[1]}, in an update {told[2]}; one set {told[3]}, {told[4]}")
        assert len(sums) == 1 and sums != {""}, "both serve the same weights"
        assert peak[True] - peak[False] > 0.9 * weights, "one set is a set less"
        assert peak[False] - held[False] < 0.5 * weights, "the version arrives in parts"

    run(scenario(), 120.0)
