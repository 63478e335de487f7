"""What the contract does not say: slots, prefill, context, faults, speed."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.instant_engine import InstantEngine

from headway.config.simulation_config import FaultConfig
from headway.config.simulation_config import SimulatedEngineConfig as Cost
from headway.config.simulation_config import SimulatedWeightsConfig as Weights
from headway.engines.base import Progress
from headway.errors import EngineCrashed, EngineError
from headway.sim.fault_injection import MESSAGE_LOSS_TIMEOUT_S, BackendHealth
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import FinishReason, RepeatedValue, VersionRun
from tests.sim.factory import FREE, request, serve

STEP = Cost(slots=4, step_s=0.1, step_per_request_s=0.0, prefill_tokens_per_s=100.0, restart_s=5.0)
NAME = "engine/0"


def now() -> float:
    return asyncio.get_running_loop().time()


async def started(cost: Cost = STEP, weights: Weights = FREE) -> tuple[SimulatedEngine, BackendHealth]:
    health = BackendHealth(NAME)
    engine = SimulatedEngine(NAME, cost, weights, health=health)
    await serve(engine, 0)
    return engine, health


def fault(kind: str, for_s: float = 0.0, factor: float = 4.0) -> FaultConfig:
    return FaultConfig(kind=kind, target=NAME, for_s=for_s, factor=factor)  # type: ignore[arg-type]


async def timed(engine: SimulatedEngine, name: str, length: int, prompt: int = 0, key: int = -1) -> float:
    await engine.generate(request(name, length, prompt=prompt, key=key), Progress())
    return now()


async def together(engine: SimulatedEngine, *wanted: tuple[int, int, int]) -> list[float]:
    """When each of `(length, prompt, key)` ends, all sent at once."""
    async with asyncio.TaskGroup() as tasks:
        results = [
            tasks.create_task(timed(engine, str(index), length, prompt, key))
            for index, (length, prompt, key) in enumerate(wanted)
        ]
    return [result.result() for result in results]


def test_members_of_a_group_pay_once_for_their_prompt() -> None:
    async def main() -> None:
        engine, _ = await started()
        assert await together(engine, (10, 100, 7), (10, 100, 7), (10, 100, 7)) == pytest.approx([2.0] * 3)
        assert await together(engine, (10, 100, -1), (10, 100, -1)) == pytest.approx([5.0] * 2)

    run_on_virtual_clock(main())


def test_a_prompt_is_computed_again_under_new_weights() -> None:
    async def main() -> None:
        engine, _ = await started()
        first = asyncio.create_task(timed(engine, "a", 20, 100, 7))
        await asyncio.sleep(1.5)
        await serve(engine, 1)
        second = asyncio.create_task(timed(engine, "b", 5, 100, 7))
        assert await second == pytest.approx(1.5 + 1.0 + 0.5)
        assert await first == pytest.approx(1.0 + 2.0 + 1.0)

    run_on_virtual_clock(main())


def test_the_youngest_is_preempted_and_comes_back_with_what_it_had() -> None:
    async def main() -> None:
        cost = Cost(slots=4, step_s=0.1, step_per_request_s=0.0, prefill_tokens_per_s=1e9, kv_tokens=100)
        engine, _ = await started(cost)
        parts = [Progress(), Progress()]
        async with asyncio.TaskGroup() as tasks:
            for index, progress in enumerate(parts):
                tasks.create_task(engine.generate(request(str(index), 60, prompt=20), progress))
            await asyncio.sleep(3.05)
            assert len(parts[1].actions) == 30 and not parts[0].actions
        assert now() == pytest.approx(6.0 + 3.0, abs=1e-6)
        assert [len(progress.actions) for progress in parts] == [60, 60]

    run_on_virtual_clock(main())


def test_a_request_too_big_for_the_context_fails_at_once() -> None:
    async def main() -> None:
        engine, _ = await started(Cost(kv_tokens=100))
        with pytest.raises(EngineError, match="101 tokens"):
            await engine.generate(request("a", 51, prompt=50), Progress())
        assert await engine.generate(request("b", 50, prompt=50), Progress()) is FinishReason.STOP

    run_on_virtual_clock(main())


def test_the_limit_on_new_tokens_counts_what_was_made_before() -> None:
    async def main() -> None:
        engine, _ = await started()
        progress = Progress()
        progress.extend(RepeatedValue(0, 6), RepeatedValue(-1.0, 6), 0)
        wanted = request("a", 1000, limit=10)
        assert await engine.generate(wanted, progress) is FinishReason.LENGTH
        assert len(progress.actions) == 10
        assert await engine.generate(wanted, progress) is FinishReason.LENGTH
        assert len(progress.actions) == 10

    run_on_virtual_clock(main())


def test_a_flip_stops_decoding_for_its_length() -> None:
    async def main() -> None:
        engine, _ = await started(weights=Weights(buckets=1))
        progress = Progress()
        task = asyncio.create_task(engine.generate(request("a", 10), progress))
        await asyncio.sleep(0.25)
        engine._flip_s = 3.0
        await serve(engine, 1)
        assert now() == pytest.approx(0.3 + 3.0)
        await task
        assert now() == pytest.approx(1.0 + 3.0)
        assert progress.runs == (VersionRun(version=0, count=3), VersionRun(version=1, count=7))

    run_on_virtual_clock(main())


def test_a_hang_only_delays_and_a_slowdown_only_slows() -> None:
    async def main() -> None:
        engine, health = await started()
        task = asyncio.create_task(timed(engine, "a", 10))
        await asyncio.sleep(0.25)
        hang = fault("hang", for_s=7.0)
        health.begin(hang)
        paused = asyncio.create_task(engine.pause())
        await asyncio.sleep(7.0)
        assert not paused.done() and not task.done()
        health.end(hang)
        await paused
        await engine.resume()
        assert now() == pytest.approx(7.3)
        slow = fault("slowdown", for_s=1.0, factor=3.0)
        health.begin(slow)
        assert await task == pytest.approx(8.0 + 7 * 0.2)
        health.end(slow)

    run_on_virtual_clock(main())


def test_a_crash_loses_the_step_in_progress_and_nothing_else() -> None:
    async def main() -> None:
        engine, health = await started()
        running, queued = Progress(), Progress()
        tasks = [asyncio.create_task(engine.generate(request("a", 100), running))]
        tasks += [asyncio.create_task(engine.generate(request(str(n), 100), queued)) for n in range(5)]
        await asyncio.sleep(0.57)
        health.begin(fault("crash", for_s=20.0))
        assert all(isinstance(error, EngineCrashed) for error in await asyncio.gather(*tasks, return_exceptions=True))
        assert len(running.actions) == 5
        with pytest.raises(EngineCrashed):
            await engine.receiver.flip()

    run_on_virtual_clock(main())


def test_restarts_fail_while_the_cause_lasts() -> None:
    async def main() -> None:
        engine, health = await started()
        crash = fault("crash", for_s=8.0)
        asyncio.get_running_loop().call_later(8.0, health.end, crash)
        health.begin(crash)
        with pytest.raises(EngineCrashed):
            await engine.restart()
        assert now() == 5.0
        await engine.restart()
        assert now() == 10.0 and engine.receiver.version == -1
        await serve(engine, 3)
        await timed(engine, "a", 5)

    run_on_virtual_clock(main())


def test_a_restart_heals_a_hang() -> None:
    async def main() -> None:
        engine, health = await started()
        health.begin(fault("hang"))
        task = asyncio.create_task(timed(engine, "a", 5))
        await asyncio.sleep(1000)
        assert not task.done()
        await engine.restart()
        with pytest.raises(EngineCrashed):
            await task
        await serve(engine, 1)
        await timed(engine, "b", 5)

    run_on_virtual_clock(main())


def test_a_request_to_a_hung_engine_can_be_cancelled() -> None:
    async def main() -> None:
        engine, health = await started()
        hang = fault("hang", for_s=10.0)
        progress = Progress()
        task = asyncio.create_task(engine.generate(request("a", 100), progress))
        await asyncio.sleep(0.55)
        health.begin(hang)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await task
        assert len(progress.actions) == 5
        health.end(hang)
        start = now()
        assert await timed(engine, "b", 3) == pytest.approx(start + 0.05 + 0.3)

    run_on_virtual_clock(main())


def test_lost_and_late_requests() -> None:
    async def main() -> None:
        engine, health = await started()
        health.begin(fault("lost_message"))
        with pytest.raises(EngineError):
            await engine.generate(request("a", 5), Progress())
        assert now() == MESSAGE_LOSS_TIMEOUT_S
        health.begin(fault("late_message", factor=6.0))
        assert await timed(engine, "b", 5) == pytest.approx(MESSAGE_LOSS_TIMEOUT_S + 6.0 + 0.5)

    run_on_virtual_clock(main())


def test_closing_aborts_with_what_was_made() -> None:
    async def main() -> None:
        engine, _ = await started()
        progress = Progress()
        task = asyncio.create_task(engine.generate(request("a", 100), progress))
        await asyncio.sleep(0.55)
        await engine.close()
        assert await task is FinishReason.ABORTED
        assert len(progress.actions) == 5
        with pytest.raises(EngineCrashed):
            await engine.generate(request("a", 100), progress)

    run_on_virtual_clock(main())


def test_one_name_cannot_run_twice() -> None:
    async def main() -> None:
        engine, _ = await started()
        task = asyncio.create_task(timed(engine, "a", 5))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already"):
            await engine.generate(request("a", 5), Progress())
        await task

    run_on_virtual_clock(main())


def test_without_costs_everything_ends_at_once() -> None:
    async def main() -> None:
        free = Cost(slots=2, step_s=0.0, step_per_request_s=0.0, prefill_tokens_per_s=float("inf"))
        engine, _ = await started(free)
        await together(engine, *[(length, 10, -1) for length in range(1, 50)])
        assert now() == 0.0

    run_on_virtual_clock(main())


def test_the_instant_engine_keeps_the_protocol() -> None:
    async def main() -> None:
        engine = InstantEngine(NAME)
        with pytest.raises(EngineError):
            await engine.generate(request("a", 5), Progress())
        await serve(engine, 2)
        progress = Progress()
        assert await engine.generate(request("a", 5), progress) is FinishReason.STOP
        assert progress.runs == (VersionRun(version=2, count=5),)
        await engine.pause()
        parts = [Progress() for _ in range(3)]
        tasks = [asyncio.create_task(engine.generate(request(str(n), 5), parts[n])) for n in range(3)]
        await asyncio.sleep(1)
        await engine.abort("0")
        tasks[1].cancel()
        assert await tasks[0] is FinishReason.ABORTED
        await asyncio.sleep(1)
        assert not tasks[2].done()
        await engine.resume()
        assert await tasks[2] is FinishReason.STOP
        assert [len(part.actions) for part in parts] == [0, 0, 5]
        gone = asyncio.create_task(engine.generate(request("a", 5), progress))
        await asyncio.sleep(0)
        await engine.restart()
        with pytest.raises(EngineCrashed):
            await gone
        assert engine.receiver.version == -1
        await engine.close()

    run_on_virtual_clock(main())


def test_a_flip_that_recomputes_the_cache_prefills_every_running_request_again() -> None:
    async def main(recompute: bool) -> tuple[float, int]:
        weights = Weights(buckets=2, recompute_cache=recompute)
        engine = SimulatedEngine(NAME, STEP, weights)
        await serve(engine, 0)
        progress = [Progress(), Progress()]
        loop = asyncio.get_running_loop()
        both = [
            loop.create_task(engine.generate(request(name, 100, prompt=50, key=7), one))
            for name, one in zip("ab", progress, strict=True)
        ]
        await asyncio.sleep(5.0)  # half a second of prefill, then 45 steps
        await serve(engine, 1)
        await asyncio.gather(*both)
        return now(), len(progress[0].actions)

    kept_s, actions = run_on_virtual_clock(main(False))
    recomputed_s, again = run_on_virtual_clock(main(True))
    assert actions == again == 100
    # the prompt once, because both share it, and the 45 tokens that each of the two had
    assert recomputed_s - kept_s == pytest.approx((50 + 2 * 45) / 100)
