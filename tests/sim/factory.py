"""Small makers for tests of the simulated world."""

from __future__ import annotations

from headway.config import simulation_config as costs
from headway.engines.base import Engine, Request
from headway.seeding import Rng
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


_RANDOM_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("crash", ("engine", "engine", "engine", "trainer", "ref_logp")),
    ("hang", ("engine", "engine", "trainer", "weights", "environment", "reward")),
    ("slowdown", ("engine", "engine", "trainer", "weights", "environment", "reward")),
    ("lost_message", ("engine", "weights", "trainer")),
    ("late_message", ("engine", "weights")),
    ("corrupted_bucket", ("weights",)),
    ("lost_node", ("node",)),
)


def draw_random_faults(
    rng: Rng, horizon_s: float, engines: int, intensity: float, *, nodes: int = 1
) -> tuple[costs.FaultConfig, ...]:
    """Draw `intensity` faults on average, spread over `horizon_s`, in order of time.

    Every fault ends by itself within a tenth of the horizon or can be repaired by a restart, so a run that
    recovers can always end.
    """
    count = int(intensity) + (rng.random() < intensity % 1.0)
    faults = [_random_fault(rng, horizon_s, engines, nodes) for _ in range(count)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _random_fault(rng: Rng, horizon_s: float, engines: int, nodes: int) -> costs.FaultConfig:
    kind, roles = _RANDOM_KINDS[rng.randrange(0, len(_RANDOM_KINDS))]
    role = roles[rng.randrange(0, len(roles))]
    number = {"engine": engines, "node": nodes}.get(role)
    target = role if number is None else f"{role}/{rng.randrange(0, max(number, 1))}"
    lasts = rng.random() < 0.5 or kind == "slowdown"
    return costs.FaultConfig(
        kind=kind,  # type: ignore[arg-type]
        target=target,
        at_s=rng.random() * horizon_s,
        for_s=rng.random() * horizon_s / 10 if lasts else 0.0,
        factor=1.0 + rng.random() * 7.0,
    )
