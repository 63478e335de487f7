"""The native engine on one GPU, through its interface and with its scheduler, beside `generate()`.

    python benchmarks/engine_gpu.py                         # every part
    python benchmarks/engine_gpu.py --parts fixed lengths   # some

Models are random, of the shapes of Qwen2.5; answers never end early; log-probabilities are always made. Setting up, the
first look at each shape (kernels are compiled, graphs captured) and weights count for nobody; prefill counts.

fixed     64, 256 and 512 requests of 512 tokens, all at once, 8 to a prompt
lengths   512 requests of log-normal lengths
long      256 requests of log-normal lengths, mean 4k, longest 32k, in the memory of one card
prompt    a prompt of 32k tokens, alone and beside requests that decode
share     what the engine makes of the bare step: 64, 256 and 512 requests, steady, KV of random numbers
attention decode and prefill of one layer beside the floor and beside FlashAttention, by page size and length
flip      other weights while requests run
generate  `transformers`, batches of the same, fewer tokens
exact     log-probabilities against full forwards, of the same weights in float32 and in bfloat16
floor     ms a step beside the time that reading weights and KV once takes, by model and batch
profile   where a step's time goes
host      what the scheduler costs a token, without a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

import end_to_end
from engine_attention import BANDWIDTH, measure_attention, time_events
from engine_host import measure_host
from headway.engines.base import Progress, Request
from headway.engines.native.decode_graphs import DecodeShape, choose_splits, round_up_lanes
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings
from headway.engines.threaded_engine import SwitchWeights
from headway.types import SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    **{name: end_to_end.SHAPES[name] for name in ("0.5B", "1.5B")},
    "7B": {**end_to_end.LARGE_SHAPES["7B"], "vocab_size": 152064},
}
PRECISION = {"dtype": "bfloat16", "kv_dtype": "auto"}
PROMPT = 64
GROUP = 8


def config_of(name: str) -> Qwen2Config:
    common = {
        "vocab_size": 151936,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return Qwen2Config(**(common | SHAPES[name]))


def make_model(name: str) -> PreTrainedModel:
    """On the GPU from the first byte."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(name))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


class Given:
    """A receiver whose weights are handed over on the device."""

    def __init__(self, switch: SwitchWeights) -> None:
        self.version = -1
        self._switch = switch

    async def take(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        await self._switch(version, tensors)
        self.version = version

    def reset(self, *, gone: bool) -> None:
        self.version = -1


async def engine_of(model: PreTrainedModel, name: str, **settings: Any) -> NativeEngine:
    chosen = NativeSettings(**({"device": "cuda"} | PRECISION | settings))
    engine = NativeEngine("engine/0", lambda: make_model(name), chosen, eos=(), make_receiver=Given)  # type: ignore[arg-type]
    await engine.receiver.take(0, dict(model.named_parameters()))  # type: ignore[attr-defined]
    return engine


def requests(lengths: list[int], vocabulary: int, mark: str = "", prompt: int = PROMPT) -> list[Request]:
    chance = random.Random(5)
    found = []
    for number, length in enumerate(lengths):
        if number % GROUP == 0:
            tokens = [chance.randrange(10, vocabulary) for _ in range(prompt)]
        params = SamplingParams(max_new_tokens=length)
        found.append(
            Request(
                request_id=f"{mark}{number}",
                session=str(number),
                prompt=tokens,
                params=params,
                prefix_key=number // GROUP,
            )
        )
    return found


async def answer(engine: NativeEngine, asked: list[Request]) -> tuple[float, list[Progress]]:
    parts = [Progress() for _ in asked]
    begin = time.perf_counter()
    await asyncio.gather(*(engine.generate(each, part) for each, part in zip(asked, parts, strict=True)))
    took = time.perf_counter() - begin
    made = [len(part.actions) for part in parts]
    assert made == [each.params.max_new_tokens for each in asked], "everyone gets what was asked for, and no more"
    return took, parts


def log_normal(count: int = 512, mean: float = 414.0, most: int = 3872) -> list[int]:
    chance = random.Random(0)
    sigma = 1.0
    drawn = [chance.lognormvariate(0.0, sigma) for _ in range(count)]
    scale = mean / (sum(drawn) / count)
    lengths = [max(8, min(most, round(value * scale))) for value in drawn]
    lengths[lengths.index(max(lengths))] = most
    return lengths


async def fixed(model: PreTrainedModel, name: str) -> None:
    print(f"\n## {name}: requests of 512 tokens, prompts of {PROMPT}, {GROUP} to a prompt")
    for count in (64, 256, 512):
        engine = await engine_of(model, name, slots=count, slot_tokens=PROMPT + 512)
        for mark in ("w", "x"):
            await answer(engine, requests([512 if mark == "w" else 40] * count, model.config.vocab_size, mark))
        rates = []
        for mark in ("a", "b"):
            took, _ = await answer(engine, requests([512] * count, model.config.vocab_size, mark))
            rates.append(count * 512 / took)
        steps = count * 512 / rates[-1] / 512 * 1e3
        print(f"{count:4} requests: {', '.join(f'{rate:,.0f}' for rate in rates)} tok/s ({steps:.2f} ms a token)")
        await engine.close()


async def lengths(model: PreTrainedModel, name: str) -> None:
    asked = log_normal()
    print(f"\n## {name}: 512 requests, log-normal, mean {sum(asked) / 512:.0f}, longest {max(asked)}")
    engine = await engine_of(model, name, slots=512, slot_tokens=PROMPT + 3900)
    rates = []
    for mark in ("w", "a", "b"):
        took, _ = await answer(engine, requests(asked, model.config.vocab_size, mark))
        rates.append(sum(asked) / took)
    print(f"{rates[1]:,.0f}, {rates[2]:,.0f} tok/s; the first time, with compiling and captures, {rates[0]:,.0f}")
    await engine.close()
    engine = await engine_of(model, name, slots=256, slot_tokens=PROMPT + 3900)
    await answer(engine, requests(asked, model.config.vocab_size, "w"))
    took, _ = await answer(engine, requests(asked * 4, model.config.vocab_size, "a"))
    print(f"2048 requests through 256 slots: {4 * sum(asked) / took:,.0f} tok/s")
    await engine.close()


async def flip(model: PreTrainedModel, name: str) -> None:
    """Other weights while 256 requests run."""
    engine = await engine_of(model, name, slots=256, slot_tokens=PROMPT + 512)
    asked = requests([512] * 256, model.config.vocab_size)
    await answer(engine, asked)
    running = asyncio.create_task(answer(engine, requests([512] * 256, model.config.vocab_size, "a")))
    taken = []
    for version in (1, 2, 3):
        await asyncio.sleep(0.15)
        begin = time.perf_counter()
        await engine.receiver.take(version, dict(model.named_parameters()))  # type: ignore[attr-defined]
        taken.append((time.perf_counter() - begin) * 1e3)
    took, parts = await running
    versions = {run.version for part in parts for run in part.runs}
    print(f"\n## {name}: three versions handed over on the device while 256 requests run: tokens of {sorted(versions)}")
    print(f"{', '.join(f'{ms:.0f}' for ms in taken)} ms each, {256 * 512 / took:,.0f} tok/s meanwhile")
    await engine.close()


async def generate(model: PreTrainedModel, name: str) -> None:
    print(f"\n## {name}: transformers generate(), 48 new tokens, no log-probabilities")
    for count in (64, 256, 512):
        ids = torch.randint(10, 1000, (count, PROMPT), device="cuda")
        mask = torch.ones_like(ids)
        for new in (4, 48):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=new, top_k=0, top_p=1.0)
            torch.cuda.synchronize()
            took = time.perf_counter() - begin
        print(f"{count:4} rows: {count * 48 / took:,.0f} tok/s ({took / 48 * 1e3:.1f} ms a step)")


async def exact(model: PreTrainedModel, name: str) -> None:
    print(f"\n## {name}: log-probabilities, 32 answers of 512 tokens")
    for dtype, kv_dtype in (("bfloat16", "auto"), ("float16", "auto"), ("fp8", "auto"), ("fp8", "fp8")):
        engine = await engine_of(model, name, slots=32, slot_tokens=PROMPT + 512, dtype=dtype, kv_dtype=kv_dtype)
        asked = requests([512] * 32, model.config.vocab_size)
        _, parts = await answer(engine, asked)
        await engine.close()
        found = torch.tensor([part.logps for part in parts], device="cuda")
        forwards = {"bfloat16": full(model, asked, parts)}
        with in_float32(model):
            forwards["float32"] = full(model, asked, parts)
        pairs = {
            f"{dtype} engine (KV {kv_dtype}) − float32 forward": found - forwards["float32"],
            f"{dtype} engine (KV {kv_dtype}) − bfloat16 forward": found - forwards["bfloat16"],
            "bfloat16 − float32 forward": forwards["bfloat16"] - forwards["float32"],
        }
        for title, gap in pairs.items():
            size = gap.abs()
            print(f"{title}: largest {size.max():.2e}, mean |·| {size.mean():.2e}, mean {gap.mean():+.1e}", flush=True)


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Compute in float32 with the same weights. A layer is widened while it runs, which loses nothing."""
    narrow, inner = model.dtype, model.model
    hooks = []
    for layer in inner.layers:
        hooks.append(layer.register_forward_pre_hook(lambda module, _: module.float() and None))
        hooks.append(layer.register_forward_hook(lambda module, *_: module.to(narrow) and None))
    inner.embed_tokens.float()
    inner.norm.float()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        inner.embed_tokens.to(narrow)  # not the whole model: frequencies of the rotation are float32 always
        inner.norm.to(narrow)


@torch.no_grad()
def full(model: PreTrainedModel, asked: list[Request], parts: list[Progress]) -> torch.Tensor:
    rows = []
    for each, part in zip(asked, parts, strict=True):
        ids = torch.tensor([[*each.prompt, *part.actions]], device="cuda")
        hidden = model.model(ids).last_hidden_state[0, len(each.prompt) - 1 : -1]
        logits = hidden.float() @ model.lm_head.weight.float().t()
        rows.append(logits.log_softmax(-1).gather(1, ids[0, len(each.prompt) :, None])[:, 0])
    return torch.stack(rows)


def bare(shape: tuple[int, int], seconds: float = 0.3) -> Callable[[Any], list[Any]]:
    """A command for the worker: time replays of one shape on lanes of equal length, with random tokens and KV."""

    def time_it(core: Any) -> list[Any]:
        runner = core._runner
        with torch.inference_mode(), torch.cuda.stream(runner._stream):
            count, length = shape
            tables, state = runner.kv.tables, runner._state
            before = tables.clone(), state.clone()
            width = -(-(length + 1) // runner.kv.page_tokens)
            pages = torch.randperm(runner.kv.pages - 1, device="cuda")[: count * width] + 1
            tables[:count, :width] = pages.view(count, width).int()
            state.zero_()
            state[:count, 0] = torch.randint(10, 100_000, (count,), device="cuda")
            state[:count, 1] = length
            runner._lanes[:count] = torch.arange(count, device="cuda")
            wanted = DecodeShape(count, choose_splits(count, runner._kv_heads, length), False)
            took = time_events(lambda: runner._run(wanted), 20)
            steps = max(20, int(seconds * 1e3 / took))
            took = time_events(lambda: runner._run(wanted), steps)
            tables.copy_(before[0])
            state.copy_(before[1])
            runner._changes = -1
            runner._stays[:] = -1
        results[shape] = took
        return []

    return time_it


def fill_kv(core: Any) -> list[Any]:
    """Random numbers everywhere: zeros use less power and run faster."""
    with torch.inference_mode(), torch.cuda.stream(core._runner._stream):
        for layer in core._runner.kv.layers:
            for part in layer:
                for rows in part.split(65_536):
                    rows.copy_(torch.randn(rows.shape, device=rows.device))
    return []


async def share(model: PreTrainedModel, name: str) -> None:
    print(f"\n## {name}: the engine beside the bare step (mean over the lengths of a run), ms a token")
    for count in (64, 256, 512):
        engine = await engine_of(model, name, slots=count, slot_tokens=PROMPT + 512)
        await engine._get_thread().call(fill_kv)
        for mark in ("w", "x"):
            await answer(engine, requests([512 if mark == "w" else 40] * count, model.config.vocab_size, mark))
        begin = time.perf_counter()
        await answer(engine, requests([1] * count, model.config.vocab_size, "p"))
        first = time.perf_counter() - begin
        took = []
        for mark in ("a", "b"):
            took.append((await answer(engine, requests([512] * count, model.config.vocab_size, mark)))[0] / 512 * 1e3)
        steps = []
        for length in (128, 256, 384, 512):
            await engine._get_thread().call(bare((count, length), 0.7))
            steps.append(results[(count, length)])
        alone = sum(steps) / 4  # lengths from 64 to 576
        ms, best = sum(took) / len(took), min(took)
        print(
            f"{count:4} requests: engine {', '.join(f'{each:.2f}' for each in took)}, bare {alone:.2f} "
            f"({', '.join(f'{step:.2f}' for step in steps)} at 128 to 512): "
            f"{alone / ms:.1%} (best {alone / best:.1%}), "
            f"{count / ms * 1e3:,.0f} tok/s; prefill and first token {first * 1e3:.0f} ms",
            flush=True,
        )
        await engine.close()


async def prompt(model: PreTrainedModel, name: str) -> None:
    """One prompt of 32k tokens alone, then beside 64 requests that decode."""
    length = 32768 - 64
    engine = await engine_of(model, name, slots=128, slot_tokens=32768, prefix_tokens=0)
    asked = requests([1] * 3, model.config.vocab_size, "p", length)
    for number, each in enumerate(asked):  # another first token each: nothing is shared
        asked[number] = replace(each, prompt=[number + 1, *each.prompt[1:]])
    alone = [(await answer(engine, [each]))[0] for each in asked[:2]][-1]
    await answer(engine, requests([256] * 64, model.config.vocab_size, "w"))
    before = (await answer(engine, requests([256] * 64, model.config.vocab_size, "a")))[0]
    running = asyncio.create_task(answer(engine, requests([256] * 64, model.config.vocab_size, "b")))
    await asyncio.sleep(0.2)
    beside = (await answer(engine, asked[2:]))[0]
    after = (await running)[0]
    print(f"\n## {name}: a prompt of {length:,} tokens takes {alone:.2f} s alone ({length / alone:,.0f} tok/s)")
    print(f"and {beside:.2f} s beside 64 requests of 256 tokens, which take {after:.2f} s instead of {before:.2f}")
    await engine.close()


PROFILE: dict[str, Any] = {"lanes": [8, 64, 512], "length": 320}
LONG: dict[str, Any] = {"seconds": None, "tokens": None, "bytes": None, "after": None}
"""When long answers are stopped (seconds, tokens), the memory of their KV cache, and the file that they wait for."""


def capture(fewest: int, longest: int) -> Callable[[Any], list[Any]]:
    """A command for the worker: capture every shape from so many lanes on and up to so many tokens.

    vLLM does the same when it starts: captures and compiling are not timed.
    """

    def capture_shapes(core: Any) -> list[Any]:
        runner = core._runner
        with torch.inference_mode(), torch.cuda.stream(runner._stream):
            runner._lanes.copy_(runner._empty_lanes)
            for lanes in sorted({round_up_lanes(count, runner._slots) for count in range(fewest, runner._slots + 1)}):
                shares = {choose_splits(lanes, runner._kv_heads, tokens) for tokens in range(64, longest + 1, 64)}
                for splits in sorted(shares):
                    runner._run(DecodeShape(lanes, splits, False))
            torch.cuda.synchronize()
            runner._changes = -1
        return []

    return capture_shapes


async def wait_for(file: str | None, seconds: float = 45) -> None:
    """Wait until a file is there."""
    for _ in range(int(seconds * 10) if file else 0):
        if await asyncio.to_thread(os.path.exists, str(file)):
            return
        await asyncio.sleep(0.1)


def count_left_over(core: Any) -> list[Any]:
    """Pages and slots that somebody holds when nobody should."""
    slots = core.scheduler.slots
    core.scheduler.forget_shared_prefixes()
    left = slots.pool.used + slots.saved_pages + len(slots._running)
    assert not left, f"{slots.pool.used} pages, {slots.saved_pages} saved ones and {len(slots._running)} slots leaked"
    return []


async def long(model: PreTrainedModel, name: str) -> None:
    asked = log_normal(256, 4096, 32768 - PROMPT)
    most = 32768
    print(f"\n## {name}: {len(asked)} requests, log-normal, mean {sum(asked) / len(asked):.0f}, longest {max(asked)}")
    engine = await engine_of(model, name, slots=256, slot_tokens=most, kv_cache_bytes=LONG["bytes"])
    found: dict[str, Any] = {}

    def look(core: Any) -> list[Any]:
        slots = core.scheduler.slots
        found.update(pages=core._runner.kv.pages, preempted=slots.preemptions, reused=slots.reused_tokens)
        return []

    begin = time.perf_counter()
    stopped = (
        LONG["seconds"] is not None or LONG["tokens"] is not None
    )  # not many steps then, and many lanes to the end
    await engine._get_thread().call(capture(96 if stopped else 1, 4096 if stopped else most))
    await answer(engine, requests([64] * 256, model.config.vocab_size, "w"))
    print(f"shapes captured and 256 short answers in {time.perf_counter() - begin:.1f} s", flush=True)
    await wait_for(LONG["after"])
    print("now", flush=True)
    begin = time.perf_counter()
    enough, left = asyncio.Event(), LONG["tokens"] or sum(asked)

    def count(actions: Sequence[Any]) -> None:
        nonlocal left
        left -= len(actions)
        if left <= 0:
            enough.set()

    parts = [Progress(count) for _ in asked]
    running = asyncio.gather(
        *(
            engine.generate(each, part)
            for each, part in zip(requests(asked, model.config.vocab_size, "a"), parts, strict=True)
        )
    )
    try:
        async with asyncio.timeout(LONG["seconds"]):
            await enough.wait()
            took = time.perf_counter() - begin
            if not LONG["tokens"]:
                await running
    except TimeoutError:
        took = time.perf_counter() - begin
        print("stopped by the clock")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    made = sum(len(part.actions) for part in parts)
    for part in parts:
        assert len(part.actions) == len(part.logps) == sum(run.count for run in part.runs)
    await engine._get_thread().call(look)
    await engine._get_thread().call(count_left_over)
    print(
        f"{made:,} of {sum(asked):,} tokens in {took:.1f} s: {made / took:,.0f} tok/s; "
        f"{found['pages']:,} pages of 64, {found['preempted']} preemptions, nothing left over"
    )
    await engine.close()


results: dict[tuple[int, int], float] = {}


async def floor(model: PreTrainedModel, name: str) -> None:
    """Steps alone, without the scheduler, and what is read."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    weights = sum(tensor.nbytes for tensor in model.parameters())
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * size * 2
    flops = 2 * weights / 2
    if PRECISION["dtype"] == "fp8":  # all but head and embedding
        outside = 2 * config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        weights = (weights + outside) // 2
    print(f"\n## {name}: a step in {PRECISION['dtype']}, {weights / 1e9:.2f} GB of weights", end=", ")
    print(f"{token:,} bytes of KV a token; length 320")
    engine = await engine_of(model, name, slots=512, slot_tokens=1024, prefix_tokens=0)
    for count in (1, 16, 64, 128, 256, 512):
        await engine._get_thread().call(bare((count, 320)))
        took = results[(count, 320)]
        least = (weights + count * 321 * token) / BANDWIDTH * 1e3
        work = max(weights / BANDWIDTH, count * flops / 7.9e14) * 1e3 + count * 321 * token / BANDWIDTH * 1e3
        print(
            f"{count:4} lanes: {took:.3f} ms, floor of bytes {least:.3f} ms ({least / took:.0%}), "
            f"with arithmetic {work:.3f} ms ({work / took:.0%}), {count / took * 1e3:,.0f} tok/s"
        )
    await engine.close()


async def profile(model: PreTrainedModel, name: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    length = PROFILE["length"]
    engine = await engine_of(model, name, slots=max(PROFILE["lanes"]), slot_tokens=2 * length, prefix_tokens=0)
    await engine._get_thread().call(fill_kv)
    for count in PROFILE["lanes"]:
        await engine._get_thread().call(bare((count, length)))
        took = results[(count, length)]
        with record(activities=[ProfilerActivity.CUDA]) as seen:
            await engine._get_thread().call(bare((count, length), 0.0))
        spent: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in seen.key_averages():
            spent[event.key[:90]] += event.self_device_time_total
            calls[event.key[:90]] += event.count
        total = sum(spent.values())
        print(
            f"\n## {name}: {PRECISION['dtype']}, KV {PRECISION['kv_dtype']}, a step of {count} lanes, length {length}",
            end="",
        )
        print(f": {took:.3f} ms, {total / 46:.0f} µs in kernels")
        for key, value in spent.most_common(16):
            print(f"{value / 46:8.1f} µs {calls[key] / 46:6.1f} × {key}")
    await engine.close()


PARTS: dict[str, Any] = {
    "fixed": fixed,
    "lengths": lengths,
    "long": long,
    "prompt": prompt,
    "share": share,
    "attention": measure_attention,
    "flip": flip,
    "generate": generate,
    "exact": exact,
    "floor": floor,
    "profile": profile,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=[*PARTS, "host"], default=["host", *PARTS])
    parser.add_argument(
        "--freeze", action="store_true", help="take what is alive at first out of the collector's sight"
    )
    parser.add_argument("--model", choices=SHAPES, nargs="*", default=["0.5B"])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "fp8"], default="bfloat16", help="of the engine")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto", help="of its KV cache")
    parser.add_argument("--profile-lanes", type=int, nargs="*", default=PROFILE["lanes"])
    parser.add_argument("--profile-length", type=int, default=PROFILE["length"])
    parser.add_argument("--long-seconds", type=float, help="stop `long` after so many seconds")
    parser.add_argument("--long-tokens", type=int, help="stop `long` after so many tokens")
    parser.add_argument("--long-kv-gib", type=float, help="give `long` less memory than there is")
    parser.add_argument("--long-after", help="let `long` wait for this file, while another engine starts")
    options = parser.parse_args(arguments)
    PRECISION.update(dtype=options.dtype, kv_dtype=options.kv_dtype)
    PROFILE.update(lanes=options.profile_lanes, length=options.profile_length)
    LONG.update(seconds=options.long_seconds, tokens=options.long_tokens, after=options.long_after)
    LONG["bytes"] = None if options.long_kv_gib is None else int(options.long_kv_gib * 2**30)
    if "host" in options.parts:
        measure_host(requests([512] * 512, 1000))
    gpu_parts = [part for part in options.parts if part != "host"]
    if not gpu_parts or not torch.cuda.is_available():
        if gpu_parts:
            print("no GPU here: the other parts need one")
        return
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit.stdout.strip() or 'unknown'}")
    if options.freeze:
        gc.collect()
        gc.freeze()
    for name in options.model:
        torch.manual_seed(0)
        model = make_model(name)
        for part in gpu_parts:
            begin = time.perf_counter()
            try:
                asyncio.run(PARTS[part](model, name))
            except Exception as error:  # a part that does not run here is part of the result
                print(f"{part} failed: {type(error).__name__}: {error}")
                if "-v" in sys.argv:
                    raise
            torch.cuda.empty_cache()
            print(f"({part}: {time.perf_counter() - begin:.0f} s, {threading.active_count()} threads)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
