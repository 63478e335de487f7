"""Thousands of requests through a KV cache that is far too small, with other weights in between.

    python benchmarks/engine_preemption.py                                    # on a GPU
    python benchmarks/engine_preemption.py --device cpu --model tiny --slots 16 --requests 40 \\
        --mean 60 --longest 250 --kv-mib 0.25 --host-mib 0.05 --flips 3

Every answer has to get exactly the tokens that were asked for, each with a finite log-probability and with the version
that made it, versions never going back; in the end no page, no saved page and no slot is held. Answers of one version
are compared with full forward passes of its weights. Host memory holds a part of what has to make room, so that some KV
comes back from there and some is computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import engine_gpu
from headway.engines.base import Progress, Request
from headway.engines.native.native_core import make_block_core
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings

engine_gpu.SHAPES["tiny"] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
VERSION_STEP = 2.0**-6
"""The part by which matrices grow from one version to the next, exact in bfloat16."""


def make_model(name: str, device: str) -> PreTrainedModel:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(engine_gpu.config_of(name))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def make_weights(model: PreTrainedModel, version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: those of version 0 with larger matrices."""
    with torch.no_grad():
        return {
            name: value * (1 + version * VERSION_STEP) if value.dim() == 2 else value
            for name, value in model.named_parameters()
        }


async def make_engine(model: PreTrainedModel, options: argparse.Namespace) -> NativeEngine:
    on_host = options.device == "cpu"
    settings = NativeSettings(
        device=options.device,
        dtype="float32" if on_host else "bfloat16",
        slots=options.slots,
        slot_tokens=engine_gpu.PROMPT + options.longest,
        kv_cache_bytes=int(options.kv_mib * 2**20),
        host_cache_bytes=int(options.host_mib * 2**20),
        page_tokens=16 if on_host else 64,
    )
    engine = NativeEngine(
        "engine/0",
        lambda: make_model(options.model, options.device),
        settings,
        eos=(),
        make_core=make_block_core,
        make_receiver=engine_gpu.Given,  # type: ignore[arg-type]
    )
    await engine.receiver.take(0, make_weights(model, 0))  # type: ignore[attr-defined]
    return engine


async def answer(
    engine: NativeEngine, model: PreTrainedModel, asked: list[Request], flips: int
) -> tuple[float, list[Progress]]:
    """Answer all requests; other weights arrive whenever a share of the tokens has been made."""
    wanted, made = sum(each.params.max_new_tokens for each in asked), 0
    reached = [asyncio.Event() for _ in range(flips)]

    def count(actions: Sequence[Any]) -> None:
        nonlocal made
        made += len(actions)
        for number, event in enumerate(reached, 1):
            if made >= wanted * number / (flips + 1):
                event.set()

    parts = [Progress(count) for _ in asked]
    begin = time.perf_counter()
    running = asyncio.gather(*(engine.generate(each, part) for each, part in zip(asked, parts, strict=True)))
    for version, event in enumerate(reached, 1):
        await event.wait()
        await engine.receiver.take(version, make_weights(model, version))  # type: ignore[attr-defined]
    await running
    return time.perf_counter() - begin, parts


def check(asked: list[Request], parts: list[Progress], flips: int) -> int:
    """Check every token of every answer; returns how many answers have several versions."""
    several = 0
    for each, part in zip(asked, parts, strict=True):
        assert len(part.actions) == each.params.max_new_tokens == len(part.logps), each.request_id
        assert all(math.isfinite(logp) and logp <= 0 for logp in part.logps), each.request_id
        assert sum(run.count for run in part.runs) == len(part.actions), each.request_id
        versions = [run.version for run in part.runs]
        assert all(earlier < later for earlier, later in pairwise(versions)), versions
        assert set(versions) <= set(range(flips + 1)), versions
        several += len(versions) > 1
    return several


@torch.no_grad()
def compare(model: PreTrainedModel, asked: list[Request], parts: list[Progress], flips: int, most: int) -> str:
    """Compare answers of the first and of the last version with full forward passes in float32."""
    found: list[torch.Tensor] = []
    for version in (0, flips):
        pairs = zip(asked, parts, strict=True)
        made = [(each, part) for each, part in pairs if [run.version for run in part.runs] == [version]]
        exact = AutoModelForCausalLM.from_config(model.config).to(model.device, torch.float32).eval()
        exact.load_state_dict(
            {name: value.float() for name, value in make_weights(model, version).items()}, strict=False
        )
        for each, part in made[:: max(1, len(made) // most)][:most]:
            ids = torch.tensor([[*each.prompt, *part.actions]], device=model.device)
            logits = exact(ids).logits[0, len(each.prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(1, ids[0, len(each.prompt) :, None])[:, 0]
            found.append((torch.tensor(part.logps, device=model.device) - wanted).abs().cpu())
        del exact
    gaps = torch.cat(found)
    return f"{len(found)} answers beside float32: mean |·| {gaps.mean():.2e}, largest {gaps.max():.2e}"


async def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = make_model(options.model, options.device)
    lengths = engine_gpu.log_normal(options.requests, options.mean, options.longest)
    engine = await make_engine(model, options)
    asked = engine_gpu.requests(lengths, model.config.vocab_size, "a")
    took, parts = await answer(engine, model, asked, options.flips)
    several = check(asked, parts, options.flips)
    seen: dict[str, Any] = {}

    def look(core: Any) -> list[Any]:
        slots = core.scheduler.slots
        seen.update(pages=core._runner.kv.pages, host=core._runner.kv.host_pages, preempted=slots.preemptions)
        return engine_gpu.count_left_over(core)

    await engine._get_thread().call(look)
    assert seen["preempted"] > 0, "the cache was large enough, nothing was seen"
    print(
        f"{options.model} on {options.device}: {len(asked):,} requests, {sum(lengths):,} tokens in {took:.1f} s "
        f"through {seen['pages']:,} pages and {seen['host']:,} in host memory: {seen['preempted']:,} preemptions, "
        f"{options.flips} other weights, {several:,} answers of several versions; none lost, nothing left over"
    )
    await engine.close()
    print(compare(model, asked, parts, options.flips, options.compared), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=engine_gpu.SHAPES, default="0.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--mean", type=float, default=800, help="tokens of an answer")
    parser.add_argument("--longest", type=int, default=6000, help="tokens of the longest answer")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--kv-mib", type=float, default=600)
    parser.add_argument("--host-mib", type=float, default=200)
    parser.add_argument("--flips", type=int, default=5, help="how often other weights arrive")
    parser.add_argument("--compared", type=int, default=12, help="answers of a version that are compared")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
