"""Trainer, scorers, weights, environments, rewards and tasks: costs and reproducible draws."""

from __future__ import annotations

import asyncio
from statistics import fmean

import pytest

from headway.config import simulation_config as costs
from headway.config.simulation_config import DistributionConfig, FaultConfig
from headway.errors import RewardError, ScoringError, TrainerCrashed, TransferError
from headway.sim.fault_injection import BackendHealth
from headway.sim.simulated_environment import SimulatedEnvironments, SimulatedReward, SimulatedTasks
from headway.sim.simulated_trainer import INITIAL_LINEAGE, SimulatedScorer, SimulatedTrainer, extend_lineage
from headway.sim.simulated_weights import SimulatedSource, SimulatedTransport
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import Episode, FinishReason, Generation, RepeatedValue, Task

from .factory import batch

NOTHING = Generation(actions=(), logps=(), runs=(), finish=FinishReason.STOP)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_step_costs_its_gpu_seconds_divided_by_the_gpus() -> None:
    async def main() -> None:
        cost = costs.SimulatedTrainerConfig(gpu_s_per_token=0.1, gpu_s_per_sample=2.0, fixed_s=0.5)
        trainer = SimulatedTrainer(cost, gpus=4)
        await trainer.train(batch(0, "a", "b", actions=20))
        assert now() == pytest.approx((0.1 * 40 + 2.0 * 2) / 4 + 0.5)

    run_on_virtual_clock(main())


def test_the_lineage_names_what_was_trained_in_order() -> None:
    async def main() -> None:
        trainer = SimulatedTrainer()
        await trainer.train(batch(0, "a", "b"))
        await trainer.train(batch(1, "c"))
        assert trainer.lineage == extend_lineage(extend_lineage(INITIAL_LINEAGE, ["a", "b"]), ["c"])
        assert trainer.lineage != extend_lineage(extend_lineage(INITIAL_LINEAGE, ["b", "a"]), ["c"])
        assert trainer.samples == 3

    run_on_virtual_clock(main())


def test_a_scorer_on_the_trainers_devices_waits_for_the_step() -> None:
    async def main() -> None:
        trainer = SimulatedTrainer(costs.SimulatedTrainerConfig(fixed_s=10.0))
        cost = costs.SimulatedScorerConfig(gpu_s_per_token=0.1)
        beside = SimulatedScorer("logp", cost, gpus=2)
        shared = SimulatedScorer("ref_logp", cost, device=trainer.device)
        group = batch(0, "a", actions=20).groups[0]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(trainer.train(batch(0, "x")))
            await asyncio.sleep(1.0)
            assert await beside.score(group) == [RepeatedValue(-1.0, 20)]
            assert now() == pytest.approx(2.0)
            await shared.score(group)
            assert now() == pytest.approx(12.0)

    run_on_virtual_clock(main())


def test_a_scorer_that_goes_down_says_so() -> None:
    async def main() -> None:
        health = BackendHealth("ref_logp")
        scorer = SimulatedScorer("ref_logp", costs.SimulatedScorerConfig(fixed_s=5.0), health=health)
        task = asyncio.create_task(scorer.score(batch(0, "a").groups[0]))
        await asyncio.sleep(1)
        health.begin(FaultConfig(kind="crash", target="ref_logp"))
        with pytest.raises(ScoringError):
            await task
        await scorer.score(batch(0, "a").groups[0])

    run_on_virtual_clock(main())


def test_a_hung_step_ends_with_the_restart_and_gathering_with_the_trainer() -> None:
    async def main() -> None:
        health = BackendHealth("trainer")
        trainer = SimulatedTrainer(weights=costs.SimulatedWeightsConfig(gather_s=8.0), health=health)
        _, buckets = await trainer.source.gather(0)
        await anext(buckets)
        assert now() == 2.0
        health.begin(FaultConfig(kind="hang", target="trainer"))
        step = asyncio.create_task(trainer.train(batch(0, "a")))
        await asyncio.sleep(100)
        assert not step.done()
        await trainer.restart()
        with pytest.raises(TrainerCrashed):
            await step
        health.begin(FaultConfig(kind="crash", target="trainer"))
        with pytest.raises(TransferError):
            await anext(buckets)

    run_on_virtual_clock(main())


def test_a_source_holds_the_newest_two_versions() -> None:
    async def main() -> None:
        source = SimulatedSource()
        for version in range(4):
            source.publish(version)
        for version in (2, 3):
            await source.gather(version)
        with pytest.raises(TransferError, match=r"\[2, 3\]"):
            await source.gather(1)

    run_on_virtual_clock(main())


def test_a_version_costs_what_it_says_in_however_many_buckets() -> None:
    async def main() -> None:
        weights = costs.SimulatedWeightsConfig(buckets=5, gather_s=10.0, send_s=5.0)
        source, transport = SimulatedSource(weights), SimulatedTransport(weights)
        source.publish(1)
        _, buckets = await source.gather(1)
        arrived = [bucket async for bucket in buckets]
        assert now() == pytest.approx(10.0)
        await asyncio.gather(*(transport.send(bucket, None) for bucket in arrived))  # type: ignore[arg-type]
        assert now() == pytest.approx(11.0)

    run_on_virtual_clock(main())


WORLD = costs.SimulationConfig(
    environment=costs.SimulatedEnvironmentConfig(
        turns=DistributionConfig(kind="gaussian", mean=5, std=2),
        reset_s=DistributionConfig(mean=1.0),
        step_s=DistributionConfig(kind="gaussian", mean=10.0, std=3.0),
        slow_probability=0.3,
        slow_factor=5.0,
    ),
    prompt_tokens=DistributionConfig(kind="lognormal", mean=300, std=100),
)


async def episode(factory: SimulatedEnvironments, position: int) -> list[tuple[float, object]]:
    """When each observation came, relative to the start, and its hint."""
    environment, start = factory(Task(position=position)), now()
    seen = [await environment.reset(Task(position=position))]
    times = [now() - start]
    while not seen[-1].done:
        seen.append(await environment.step(NOTHING))
        times.append(round(now() - start, 9))
    return [(time, (one.hint, len(one.tokens), one.reward)) for time, one in zip(times, seen, strict=True)]


def test_what_an_episode_draws_does_not_depend_on_the_order_of_running() -> None:
    async def one_by_one() -> dict[int, object]:
        factory = SimulatedEnvironments(WORLD, seed=3)
        return {position: await episode(factory, position) for position in range(20)}

    async def all_at_once_backwards() -> dict[int, object]:
        factory = SimulatedEnvironments(WORLD, seed=3)
        positions = list(reversed(range(20)))
        return dict(zip(positions, await asyncio.gather(*(episode(factory, p) for p in positions)), strict=True))

    assert run_on_virtual_clock(one_by_one()) == run_on_virtual_clock(all_at_once_backwards())


def test_members_share_a_prompt_and_nothing_else() -> None:
    async def main() -> None:
        factory = SimulatedEnvironments(WORLD)
        first, second = await episode(factory, 1), await episode(factory, 1)
        assert first != second
        assert first[0][1][1] == second[0][1][1]  # type: ignore[index]
        task = SimulatedTasks(WORLD).task(1)
        assert task is not None and len(task.prompt) == first[0][1][1]  # type: ignore[index]

    run_on_virtual_clock(main())


def test_a_hung_environment_waits_for_the_agents_timeout() -> None:
    async def main() -> None:
        world = costs.SimulationConfig(environment=costs.SimulatedEnvironmentConfig(hang_probability=1.0))
        environment = SimulatedEnvironments(world)(Task(position=0))
        await environment.reset(Task(position=0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await environment.step(NOTHING)

    run_on_virtual_clock(main())


async def scores(reward: SimulatedReward, position: int, members: int = 16) -> list[float]:
    task = Task(position=position)
    names = (f"{position}.{member}.0" for member in range(members))
    return [(await reward.score(Episode(sample_id=name, task=task, turns=()))).value for name in names]


def test_groups_vary_unless_they_are_of_the_share_that_does_not() -> None:
    async def main() -> None:
        reward = SimulatedReward(costs.SimulatedRewardConfig(zero_variance_share=0.25), seed=1)
        groups = [await scores(reward, position) for position in range(400)]
        equal = fmean(len(set(group)) == 1 for group in groups)
        assert equal == pytest.approx(0.25, abs=0.06)
        assert fmean(value for group in groups for value in group) == pytest.approx(0.5, abs=0.05)

    run_on_virtual_clock(main())


def test_a_failed_verdict_may_succeed_the_next_time() -> None:
    async def main() -> None:
        reward = SimulatedReward(costs.SimulatedRewardConfig(failure_probability=0.5), seed=1)
        sure = SimulatedReward(seed=1)
        for index in range(50):
            one = Episode(sample_id=str(index), task=Task(position=index), turns=())
            verdict = None
            while verdict is None:
                try:
                    verdict = await reward.score(one)
                except RewardError:
                    continue
            assert verdict == await sure.score(one)

    run_on_virtual_clock(main())


def test_tasks_are_given_out_again_and_may_end() -> None:
    tasks = SimulatedTasks(WORLD, seed=5, size=3)
    assert [tasks.task(position) for position in range(3)] == [tasks.task(position) for position in range(3)]
    assert tasks.task(3) is None
    endless = SimulatedTasks(WORLD, seed=5).task(10**9)
    assert endless is not None and len(endless.prompt) > 0
