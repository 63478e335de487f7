"""One measurement, in a process that does nothing else: `python -m growth.measured KIND < arguments > figures`.

Base is what the process has before there is a model: the interpreter, torch, transformers. CPU seconds are those of
this process, so other load on the machine hardly counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from growth.computed import Shape, engine_mb, trainer_mb
from growth.memory import Watch, own_mb
from headway.models.model_loading import load_model, make_architecture_factory

MEMBERS, PROMPT, ANSWER = 4, 32, 56
"""Of a trained group: 32 + 4 × 56 = 256 packed tokens."""
GROUP_TOKENS = PROMPT + MEMBERS * ANSWER
PACK_TOKENS = 1024
PROMPT_TOKENS = 16
"""Of a generated answer."""
BUCKET_MB = 128
UPDATES = 4
"""Versions that an engine takes in while it generates: memory has settled by then."""
VERSIONS = 3
"""That a trainer holds for engines."""


def base(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a process with torch, transformers and our own parts has before it has a model."""
    import headway.engines.native.native_engine
    import headway.trainers.local.local_trainer  # noqa: F401

    make_architecture_factory(arguments["model"])()
    return {"base_mb": own_mb(shared=False)}


# -- an engine


def engine(arguments: dict[str, Any]) -> dict[str, Any]:
    """Answers of one length in all slots, then versions that arrive while more are made."""
    import headway.engines.native  # noqa: F401  # the base has it

    make = make_architecture_factory(arguments["model"])
    shape = Shape.of(make())
    base_mb = own_mb(shared=False)
    with Watch() as watch:
        found = asyncio.run(_engine(make, arguments))
    slots, slot_tokens = arguments["slots"], PROMPT_TOKENS + arguments["length"]
    computed = engine_mb(shape, slots=slots, slot_tokens=slot_tokens, prefix_tokens=0, bucket_mb=BUCKET_MB)
    return {**found, "base_mb": base_mb, "peak_mb": watch.peak_mb, "computed_mb": computed}


async def _engine(make: Callable[[], Any], arguments: dict[str, Any]) -> dict[str, Any]:
    from headway.engines.native.native_engine import NativeEngine
    from headway.engines.native.settings import NativeSettings
    from headway.weights.shared_memory import PayloadReader

    slots, length = arguments["slots"], arguments["length"]
    settings = NativeSettings(slots=slots, slot_tokens=PROMPT_TOKENS + length)
    subject = NativeEngine("engine/0", make, settings, eos=(), open_payload=PayloadReader().open)
    await _load(subject, arguments["versions"], 0)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    made = await _answers(subject, slots, length)
    cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    for version in range(1, UPDATES + 1):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_answers(subject, slots, min(length, 8)))
            tasks.create_task(_load(subject, arguments["versions"], version))
    rest_mb = own_mb(shared=False)
    await subject.close()
    return {"tokens": made, "cpu_s": cpu_s, "wall_s": wall_s, "rest_mb": rest_mb}


async def _load(subject: Any, versions: list[dict[str, Any]], number: int) -> None:
    """What was published, by turns, as version `number`."""
    from headway.codec import decode

    published = versions[number % len(versions)]
    await subject.receiver.begin(replace(decode(bytes.fromhex(published["manifest"])), version=number))
    for bucket in published["buckets"]:
        await subject.receiver.load(replace(decode(bytes.fromhex(bucket)), version=number))
    await subject.receiver.flip()


async def _answers(subject: Any, slots: int, length: int) -> int:
    from headway.engines.base import Progress, Request
    from headway.types import SamplingParams

    chance = random.Random(length)
    requests = [
        Request(
            request_id=f"{length}/{slot}",
            session=str(slot),
            prompt=[chance.randrange(100, 40000) for _ in range(PROMPT_TOKENS)],
            params=SamplingParams(max_new_tokens=length),
        )
        for slot in range(slots)
    ]
    parts = [Progress() for _ in requests]
    await asyncio.gather(*(subject.generate(one, part) for one, part in zip(requests, parts, strict=True)))
    return sum(len(part.actions) for part in parts)


# -- a trainer


def trainer(arguments: dict[str, Any]) -> dict[str, Any]:
    """A small step, then one of so many tokens, then a version more than are held."""
    import headway.trainers.local.local_trainer  # noqa: F401  # the base has it

    shape = Shape.of(make_architecture_factory(arguments["model"])())
    base_mb = own_mb(shared=True)
    with Watch(shared=True) as watch:
        found = asyncio.run(_trainer(arguments))
    computed = trainer_mb(
        shape,
        pack_tokens=min(arguments["tokens"], PACK_TOKENS),
        tree_tokens=GROUP_TOKENS,
        checkpointing=arguments["checkpointing"],
        versions=VERSIONS,
    )
    return {**found, "base_mb": base_mb, "peak_mb": watch.peak_mb, "computed_mb": computed}


async def _trainer(arguments: dict[str, Any]) -> dict[str, Any]:
    from headway.algorithms.advantages import AdvantageSettings
    from headway.trainers.local.local_trainer import LocalTrainer
    from headway.trainers.local.settings import LocalSettings
    from headway.weights.weight_store import SharedArena, WeightStore

    name = arguments["model"]
    settings = LocalSettings(
        advantages=AdvantageSettings(),
        micro_batch_tokens=PACK_TOKENS,
        gradient_checkpointing=arguments["checkpointing"],
    )
    store = WeightStore(bucket_mb=BUCKET_MB, wire_dtype=torch.float32, arena=SharedArena())
    subject = LocalTrainer(lambda: load_model(name, torch.float32), settings, store)
    await subject.train(_batch(0, GROUP_TOKENS))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    metrics = await subject.train(_batch(1, arguments["tokens"]))
    cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    rest_mb = own_mb(shared=True)
    await subject.close()
    store.close()
    return {"tokens": int(metrics["packed_tokens"]), "cpu_s": cpu_s, "wall_s": wall_s, "rest_mb": rest_mb}


def _batch(trained: int, tokens: int) -> Any:
    """Groups of 256 packed tokens, rewards by turns."""
    from headway.types import (
        Batch,
        Episode,
        FinishReason,
        Generation,
        Sample,
        SampleGroup,
        Score,
        Task,
        Turn,
        VersionRun,
    )

    chance = random.Random(trained)
    runs = (VersionRun(version=trained, count=ANSWER),)

    def sample(name: str, prompt: list[int], reward: float) -> Sample:
        actions = [chance.randrange(100, 40000) for _ in range(ANSWER)]
        made = Generation(actions=actions, logps=[-10.0] * ANSWER, runs=runs, finish=FinishReason.LENGTH)
        turn = Turn(observation=prompt, generation=made)
        episode = Episode(sample_id=name, task=Task(position=0), turns=(turn,))
        score = Score(value=reward)
        return Sample(sample_id=name, episode=episode, oldest=trained, newest=trained, actions=ANSWER, score=score)

    groups = []
    for number in range(tokens // GROUP_TOKENS):
        prompt = [chance.randrange(100, 40000) for _ in range(PROMPT)]
        members = tuple(sample(f"{number}.{member}.0", prompt, member % 2) for member in range(MEMBERS))
        groups.append(SampleGroup(group_id=number, task=Task(position=number), samples=members))
    return Batch(trained=trained, groups=tuple(groups))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"base": base, "engine": engine, "trainer": trainer}[sys.argv[1]](json.load(sys.stdin))))
