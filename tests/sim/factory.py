"""Small makers for tests of the simulated world."""

from __future__ import annotations

from headway.config import simulation_config as costs
from headway.engines.base import Engine, Request
from headway.sim.simulated_weights import SimulatedSource
from headway.types import Batch, Episode, RepeatedValue, Sample, SampleGroup, SamplingParams, Task

FREE = costs.SimulatedWeightsConfig(buckets=2)


def request(name: str, length: int, *, prompt: int = 0, key: int = -1, limit: int = 100_000) -> Request:
    return Request(
        request_id=name,
        session=name,
        prompt=RepeatedValue(0, prompt),
        params=SamplingParams(max_new_tokens=limit),
        prefix_key=key,
        hint=length,
    )


async def serve(engine: Engine, version: int, weights: costs.SimulatedWeightsConfig = FREE) -> None:
    """Bring `version` to the engine, without a transport."""
    source = SimulatedSource(weights)
    source.publish(version)
    manifest, buckets = await source.gather(version)
    await engine.receiver.begin(manifest)
    async for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()


def sample(name: str, actions: int = 10, position: int = 0) -> Sample:
    episode = Episode(sample_id=name, task=Task(position=position), turns=())
    return Sample(sample_id=name, episode=episode, oldest=0, newest=0, actions=actions)


def batch(trained: int, *names: str, actions: int = 10) -> Batch:
    samples = tuple(sample(name, actions) for name in names)
    return Batch(trained=trained, groups=(SampleGroup(group_id=trained, task=Task(position=0), samples=samples),))
