"""Rollout engines on a CPU in one run: the native one, `generate()`, and continuous batching of `transformers`.

    python benchmarks/engine_cpu.py                      # a random model of the shape of SmolLM2-135M
    python benchmarks/engine_cpu.py --model PATH         # a model of yours

Groups share prompts; lengths of answers are log-normal, the same for everyone, and nobody may end earlier. What counts
are the tokens asked for, per second of CPU time of the whole process, prefill included, setting up (model, weights,
memory) not. The native engine reports log-probabilities; the others are spared that. `generate()` gets batches as large
as the slots and pads to the longest.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
)

from headway.engines.base import Progress, Request
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings
from headway.types import SamplingParams
from headway.weights.base import Bucket, Manifest, TensorEntry, compute_checksum

SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


THREADS = os.environ.get("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Work:
    """What everyone has to generate."""

    prompts: list[list[int]]
    lengths: list[int]
    group: int
    slots: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def make_work(options: argparse.Namespace, vocabulary: int) -> Work:
    chance = random.Random(options.seed)
    prompts, lengths = [], []
    for _ in range(options.prompts):
        prompt = [chance.randrange(10, vocabulary) for _ in range(chance.randint(24, 64))]
        for _ in range(options.group):
            prompts.append(prompt)
            lengths.append(max(4, min(options.longest, round(chance.lognormvariate(options.log_mean, 0.9)))))
    return Work(prompts, lengths, options.group, options.slots)


def native(model: PreTrainedModel, work: Work, profile: bool) -> int:
    return asyncio.run(_native(model, work, profile))


async def _native(model: PreTrainedModel, work: Work, profile: bool) -> int:
    longest = max(map(len, work.prompts)) + max(work.lengths)
    settings = NativeSettings(slots=work.slots, slot_tokens=longest, threads=int(THREADS))
    engine = NativeEngine("engine/0", lambda: AutoModelForCausalLM.from_config(model.config), settings, eos=())
    await serve(engine, model)
    requests = [
        Request(
            request_id=str(number),
            session=str(number),
            prompt=prompt,
            params=SamplingParams(max_new_tokens=length),
            prefix_key=number // work.group,
        )
        for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]
    parts = [Progress() for _ in requests]
    profiler = cProfile.Profile()
    if profile:
        await engine._get_thread().call(lambda core: profiler.enable() or [])
    begin = time.process_time()
    await asyncio.gather(*(engine.generate(each, part) for each, part in zip(requests, parts, strict=True)))
    spent["native"] = time.process_time() - begin
    if profile:
        await engine._get_thread().call(lambda core: profiler.disable() or [])
        pstats.Stats(profiler).sort_stats("tottime").print_stats(28)
    await engine.close()
    return sum(len(part.actions) for part in parts)


async def serve(engine: NativeEngine, model: PreTrainedModel) -> None:
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    manifest = Manifest(
        version=0,
        tensors=tuple(TensorEntry(name=n, shape=tuple(t.shape), dtype="float32") for n, t in tensors.items()),
        checksums=tuple(compute_checksum(tensor.numpy()) for tensor in tensors.values()),
        total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )
    await engine.receiver.begin(manifest)
    for index, tensor in enumerate(tensors.values()):
        bucket = Bucket(version=0, index=index, checksum=manifest.checksums[index], payload=tensor.numpy())
        await engine.receiver.load(bucket)
    await engine.receiver.flip()


def generate(model: PreTrainedModel, work: Work, profile: bool) -> int:
    """Batches in order of arrival, padded on the left."""
    begin, made = time.process_time(), 0
    for start in range(0, len(work.prompts), work.slots):
        prompts, lengths = work.prompts[start : start + work.slots], work.lengths[start : start + work.slots]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=max(lengths), top_k=0, top_p=1.0)
        made += sum(lengths)
    spent["generate()"] = time.process_time() - begin
    return made


def continuous(model: PreTrainedModel, work: Work, profile: bool) -> int:
    blocks = work.slots * (max(map(len, work.prompts)) + max(work.lengths)) // 32 + work.slots
    sampling = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=128 + work.slots)
    made = 0
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=config) as manager:
        begin = time.process_time()
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        for _ in work.prompts:
            result = manager.get_result(timeout=600)
            if result is None or result.error:
                raise RuntimeError(f"no result: {result}")
            made += len(result.generated_tokens)
        spent["continuous batching"] = time.process_time() - begin
    return made


spent: dict[str, float] = {}
CONTESTANTS: dict[str, Callable[[PreTrainedModel, Work, bool], int]] = {
    "native": native,
    "generate()": generate,
    "continuous batching": continuous,
}


def load_model(path: str | None, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if path is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.generation_config.eos_token_id = None
    else:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2_135M))
    return model.eval()  # type: ignore[no-any-return]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name; a random SmolLM2-135M without it")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--longest", type=int, default=192, help="tokens of the longest answer")
    parser.add_argument("--log-mean", type=float, default=3.4, help="of the log-normal lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=CONTESTANTS, nargs="*", default=list(CONTESTANTS))
    parser.add_argument("--profile", action="store_true", help="show where the native engine spends its time")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    torch.set_num_threads(int(THREADS))
    model = load_model(options.model, options.seed)
    work = make_work(options, model.config.vocab_size)
    table = Table(
        title=f"{len(work.prompts)} requests, {work.tokens} tokens, longest {max(work.lengths)}, "
        f"{work.slots} slots, {THREADS} thread(s)"
    )
    for column in ("engine", "tokens", "CPU s", "wall s", "tokens per CPU-second", "native is faster"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    rates: dict[str, float] = {}
    for name in options.only:
        begin = time.perf_counter()
        try:
            made = CONTESTANTS[name](model, work, options.profile)
        except Exception as error:  # a contestant that does not run here is part of the result
            table.add_row(name, f"failed: {type(error).__name__}: {error}"[:60])
            continue
        wall = time.perf_counter() - begin
        rates[name] = made / spent[name]
        ratio = f"{rates['native'] / rates[name]:.2f} ×" if "native" in rates else ""
        table.add_row(name, str(made), f"{spent[name]:.1f}", f"{wall:.1f}", f"{rates[name]:.1f}", ratio)
    Console(width=120).print(table)


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:  # some libraries read it only once, when they are loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": THREADS})
    main(sys.argv[1:])
