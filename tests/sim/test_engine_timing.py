"""The closed form against the slow truth."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.simulation_config import SimulatedEngineConfig as Cost
from headway.engines.base import Progress
from headway.sim.continuous_batch import DecodePace
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import FinishReason

from .factory import FREE, request, serve
from .reference import Job, Pause, simulate

UGLY_S = 0.0073133
"""Arrivals fall on multiples of it, which no sum of step costs hits by chance."""


def job_of(arrival: int, prompt: int, length: int, key: int) -> Job:
    """Requests of one key have one prompt."""
    return Job(at_s=arrival * UGLY_S, prompt=prompt if key < 0 else (0, 17, 45)[key], length=length, key=key)


jobs = st.builds(job_of, st.integers(0, 300), st.integers(0, 60), st.integers(1, 40), st.integers(-1, 2))
cost_of = st.builds(
    Cost,
    slots=st.integers(1, 5),
    step_s=st.sampled_from([0.0, 0.01, 0.0171]),
    step_per_request_s=st.sampled_from([0.0, 0.003]),
    step_per_context_token_s=st.sampled_from([0.0, 1e-6, 1e-4]),
    prefill_tokens_per_s=st.sampled_from([500.0, 20_000.0, float("inf")]),
    kv_tokens=st.sampled_from([None, 100, 150, 400]),
)
pauses = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 10)).map(
        lambda pair: Pause(at_s=pair[0] * 0.0611, until_s=(pair[0] + pair[1]) * 0.0611)
    ),
    max_size=2,
)
flips = st.lists(st.integers(1, 60).map(lambda n: n * 0.0373), max_size=3, unique=True).map(sorted)


async def measured(
    cost: Cost, jobs: list[Job], pauses: list[Pause], flips: list[float]
) -> list[tuple[float, Progress]]:
    """The same through the engine: when each ended, and with what."""
    engine = SimulatedEngine("engine/0", cost, FREE)
    await serve(engine, 0)
    loop = asyncio.get_running_loop()

    async def one(index: int, job: Job) -> tuple[float, Progress]:
        await asyncio.sleep(job.at_s)
        progress = Progress()
        wanted = request(str(index), job.length, prompt=job.prompt, key=job.key)
        assert await engine.generate(wanted, progress) is FinishReason.STOP
        return loop.time(), progress

    async def paused(pause: Pause) -> None:
        await asyncio.sleep(pause.at_s)
        stopping = asyncio.create_task(engine.pause())
        await asyncio.sleep(pause.until_s - loop.time())
        await engine.resume()
        await stopping

    async def flipped(version: int, at_s: float) -> None:
        await asyncio.sleep(at_s)
        await serve(engine, version)

    async with asyncio.TaskGroup() as tasks:
        results = [tasks.create_task(one(index, job)) for index, job in enumerate(jobs)]
        for pause in pauses:
            tasks.create_task(paused(pause))
        for index, at_s in enumerate(flips):
            tasks.create_task(flipped(index + 1, at_s))
    return [result.result() for result in results]


def disjoint(pauses: list[Pause]) -> list[Pause]:
    """Overlapping pauses end with the first resume; keep those that do not."""
    kept: list[Pause] = []
    for pause in sorted(pauses, key=lambda pause: pause.at_s):
        if not kept or pause.at_s > kept[-1].until_s:
            kept.append(pause)
    return kept


@settings(max_examples=300, deadline=None)
@given(cost_of, st.lists(jobs, min_size=1, max_size=10), pauses, flips)
def test_ends_and_versions_are_those_of_the_slow_truth(
    cost: Cost, jobs: list[Job], pauses: list[Pause], flips: list[float]
) -> None:
    if not cost.step_s:
        flips = []  # Where steps take no time, which of them a flip falls between is nobody's business.
    if not cost.step_s and not cost.step_per_request_s and not cost.step_per_context_token_s:
        cost = replace(cost, step_s=0.002)
    pauses = disjoint(pauses)
    results = run_on_virtual_clock(measured(cost, jobs, pauses, flips), max_events=100_000)
    simulate(cost, jobs, pauses, flips)
    for job, (ended_s, progress) in zip(jobs, results, strict=True):
        assert ended_s == pytest.approx(job.ended_s, rel=1e-9, abs=1e-9)
        assert [run.version for run in progress.runs for _ in range(run.count)] == job.versions


@given(
    st.sampled_from([0.0, 1e-5, 0.01, 1.0]),
    st.sampled_from([0.0, 1e-9, 1e-6, 0.01]),
    st.integers(0, 50_000),
    st.floats(0.01, 0.99),
)
def test_the_inverse_of_the_closed_form_finds_the_step(first: float, growth: float, steps: int, share: float) -> None:
    pace = DecodePace(first + 1e-6, growth)
    start, end = pace.time_of(steps), pace.time_of(steps + 1)
    assert pace.steps_in(start) == steps
    assert pace.next_boundary(start) == steps
    inside = start + (end - start) * share
    assert pace.steps_in(inside) == steps
    assert pace.next_boundary(inside) == steps + 1


def test_the_cost_of_a_long_stretch_is_the_sum_of_its_steps() -> None:
    pace = DecodePace(0.01, 1e-6)
    assert pace.time_of(1000) == pytest.approx(sum(0.01 + 1e-6 * step for step in range(1000)))


def test_a_thousand_tokens_cost_a_handful_of_events() -> None:
    async def main() -> int:
        engine = SimulatedEngine("engine/0", Cost(slots=8), FREE)
        await serve(engine, 0)
        async with asyncio.TaskGroup() as tasks:
            for index in range(8):
                tasks.create_task(engine.generate(request(str(index), 1000 + index), Progress()))
        return asyncio.get_running_loop().events  # type: ignore[attr-defined,no-any-return]

    assert run_on_virtual_clock(main()) < 100
