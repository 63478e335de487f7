"""What a training step and a weight update cost on one core: packed and not, and each part of the way to an engine.

    python benchmarks/trainer_cpu.py [--layers 6] [--prompt 64] [--answer 24]

The shape is that of SmolLM2-135M with fewer layers (30 make it whole), random weights, fp32, one thread. CPU seconds
are those of this process, so other load on the machine does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.advantages import AdvantageSettings
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings
from headway.types import Batch, Episode, FinishReason, Generation, Sample, SampleGroup, Score, Task, Turn, VersionRun
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import SharedArena, WeightStore

GROUPS, MEMBERS = 2, 8


def model_of(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
    )


def batch_of(trained: int, prompt: int, answer: int) -> Batch:
    dice = random.Random(trained)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(49152) for _ in range(count))

    def sample(name: str, seen: tuple[int, ...], reward: float) -> Sample:
        runs = (VersionRun(version=trained, count=answer),)
        made = Generation(actions=tokens(answer), logps=(-10.0,) * answer, runs=runs, finish=FinishReason.STOP)
        episode = Episode(sample_id=name, task=Task(position=0), turns=(Turn(observation=seen, generation=made),))
        score = Score(value=reward)
        return Sample(sample_id=name, episode=episode, oldest=trained, newest=trained, actions=answer, score=score)

    groups = []
    for number in range(GROUPS):
        seen = tokens(prompt)
        members = tuple(sample(f"{number}.{index}.0", seen, float(index % 2)) for index in range(MEMBERS))
        groups.append(SampleGroup(group_id=number, task=Task(position=number), samples=members))
    return Batch(trained=trained, groups=tuple(groups))


async def steps(name: str, layers: int, prompt: int, answer: int, **options: Any) -> LocalTrainer:
    """Two steps; the second is reported."""
    chosen = LocalSettings(advantages=AdvantageSettings(), micro_batch_tokens=2048, **options)
    trainer = LocalTrainer(lambda: model_of(layers), chosen, WeightStore(bucket_mb=64, arena=SharedArena()))
    for version in range(2):
        began = time.process_time()
        metrics = await trainer.train(batch_of(version, prompt, answer))
        spent_s = time.process_time() - began
    rate = metrics["tokens"] / spent_s
    print(f"{name:34s} {spent_s:7.2f} s   {metrics['packed_tokens']:6.0f} tokens read   {rate:6.1f} trained tokens/s")
    return trainer


async def update(trainer: LocalTrainer) -> None:
    """Publish, gather, load, flip."""

    async def switch(version: int, tensors: Mapping[str, Tensor]) -> None:
        pass

    receiver, spent = DoubleBufferedReceiver(switch, dtype=torch.float32), dict[str, float]()
    store: Any = trainer.source
    for _ in range(2):  # the first pays for fresh memory
        marks = [time.process_time()]
        store.publish(trainer.version, trainer.learner.policy.weights())
        marks.append(time.process_time())
        manifest, buckets = await store.gather(trainer.version)
        marks.append(time.process_time())
        await receiver.begin(manifest)
        async for bucket in buckets:
            await receiver.load(bucket)
        marks.append(time.process_time())
        await receiver.flip()
        marks.append(time.process_time())
        parts = ("publish", "checksums", "load", "flip")
        spent = dict(zip(parts, (end - start for start, end in pairwise(marks)), strict=True))
    costs = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in spent.items())
    print(f"{manifest.total_bytes / 1e6:.0f} MB in bf16: {costs}")
    receiver.reset(gone=True)
    store.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description="what a training step costs on one core")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=24)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = (args.layers, args.prompt, args.answer)
    print(f"{GROUPS} groups of {MEMBERS}, prompt {args.prompt}, answer {args.answer}, {args.layers} layers, one thread")
    for name, options in {
        "members one by one": {"share_prompts": False, "gradient_checkpointing": False},
        "as trees": {"gradient_checkpointing": False},
        "as trees, activations recomputed": {"gradient_checkpointing": True},
    }.items():
        trainer = await steps(name, *shape, **options)
        if options == {"gradient_checkpointing": False}:
            await update(trainer)
        await trainer.close()
        trainer.source.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    asyncio.run(main())
