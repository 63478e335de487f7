"""One episode: ask, step, until done; and everything an environment can do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from headway.environments.base import Observation
from headway.errors import EnvironmentFailed
from headway.rollout.concurrency import TurnBarrier
from headway.rollout.environment_agent import EnvironmentAgent
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import Episode, Generation, Task, VersionRun
from tests.flow.factory import RELIABILITY, Scripted, make_sample_group
from tests.rollout.factory import Rollout
from tests.sim.factory import serve


def play(main: Callable[[Rollout], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def outer() -> None:
        async with asyncio.TaskGroup() as tasks:
            await main(await Rollout(tasks=tasks, **settings).begin())

    run_on_virtual_clock(outer(), max_time_s=10_000)


def make_agent(rollout: Rollout, name: str = "0.0", **how: Any) -> EnvironmentAgent:
    task = Task(position=0)
    return EnvironmentAgent(sample_id=name, task=task, hub=rollout.hub, settings=rollout.settings, **how)


def environment_of(*turns: Any) -> tuple[Any, Scripted]:
    """One episode of so many turns, and its factory, which counts what was closed."""
    factory = Scripted(otherwise=tuple(turns))
    return factory(Task(position=0)), factory


def test_an_episode_has_a_turn_for_every_answer_of_the_environment() -> None:
    async def main(rollout: Rollout) -> None:
        environment, factory = environment_of(10, 20, 30)
        episode = await make_agent(rollout).run(environment)
        assert [len(turn.generation.actions) for turn in episode.turns] == [10, 20, 30]
        assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0]
        assert rollout.event_loop.time() == pytest.approx(6.0)
        assert episode.runs == (VersionRun(version=0, count=60),)
        assert factory.closed == 1
        requests = [event.data["request"] for event in rollout.events if event.kind == "request.start"]
        assert requests == ["0.0/0", "0.0/1", "0.0/2"]

    play(main)


class Observing:
    """An environment that says something every turn, and remembers nothing."""

    def __init__(self) -> None:
        self.steps = 0

    async def reset(self, task: Task) -> Observation:
        return Observation(tokens=(1, 2, 3), hint=4)

    async def step(self, generation: Generation) -> Observation:
        self.steps += 1
        return Observation(tokens=(7, 8), hint=5, done=self.steps == 2, info={"won": True})

    async def close(self) -> None:
        return None


def test_the_context_grows_by_observations_and_actions_and_only_actions_are_kept_as_such() -> None:
    async def main(rollout: Rollout) -> None:
        episode = await make_agent(rollout).run(Observing())
        assert [tuple(turn.observation) for turn in episode.turns] == [(1, 2, 3), (7, 8)]
        assert [len(turn.generation.actions) for turn in episode.turns] == [4, 5]
        assert episode.info == {"won": True}

    play(main)


class Forgetful(Observing):
    """Begins its context anew with every turn."""

    async def step(self, generation: Generation) -> Observation:
        return replace(await super().step(generation), starts_new_context=True)


def test_a_context_may_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(rollout: Rollout) -> None:
        prompts: list[tuple[int, ...]] = []
        generate = rollout.hub.generate

        async def watched(request: Any, *args: Any, **how: Any) -> Any:
            prompts.append(tuple(request.prompt))
            return await generate(request, *args, **how)

        monkeypatch.setattr(rollout.hub, "generate", watched)
        episode = await make_agent(rollout).run(Forgetful())
        assert prompts == [(1, 2, 3), (7, 8)]
        assert [turn.starts_new_context for turn in episode.turns] == [False, True]

    play(main)


@pytest.mark.parametrize("turn", [0, 1])
def test_whatever_an_environment_raises_is_a_failed_episode_and_it_is_closed(turn: int) -> None:
    async def main(rollout: Rollout) -> None:
        environment, factory = environment_of(*[10] * turn, KeyError("board"))
        with pytest.raises(EnvironmentFailed, match=r"0\.0: step raised KeyError: 'board'"):
            await make_agent(rollout).run(environment)
        assert factory.closed == 1

    play(main)


def test_an_environment_that_does_not_answer_fails_at_its_deadline() -> None:
    async def main(rollout: Rollout) -> None:
        environment, factory = environment_of(None)
        with pytest.raises(EnvironmentFailed, match=r"0\.0: no answer to step after 8\.0 s"):
            await make_agent(rollout).run(environment)
        assert rollout.event_loop.time() == pytest.approx(8.1) and factory.closed == 1

    play(main)


def test_an_episode_that_takes_too_long_as_a_whole_fails_between_two_turns() -> None:
    async def main(rollout: Rollout) -> None:
        environment, factory = environment_of(*[50] * 100)
        with pytest.raises(EnvironmentFailed, match=r"0\.0: not over after 5 turns and 22 s"):
            await make_agent(rollout).run(environment)
        assert rollout.event_loop.time() == pytest.approx(25.0)
        assert factory.closed == 1 and rollout.hub.replicas[0].load == 0

    play(main, reliability=replace(RELIABILITY, episode_timeout_s=22))


def test_time_spent_waiting_for_a_slot_is_not_held_against_an_episode() -> None:
    async def main(rollout: Rollout) -> None:
        first, second = environment_of(300)[0], environment_of(50, 50)[0]
        episodes = await asyncio.gather(make_agent(rollout, "0.0").run(first), make_agent(rollout, "0.1").run(second))
        assert rollout.event_loop.time() == pytest.approx(40.0)
        assert [len(episode.turns) for episode in episodes] == [1, 2]

    play(main, slots=1, reliability=replace(RELIABILITY, episode_timeout_s=22))


def test_cancelling_an_agent_aborts_its_request_and_closes_its_environment() -> None:
    async def main(rollout: Rollout) -> None:
        environment, factory = environment_of(1000)
        agent = make_agent(rollout)
        task = asyncio.ensure_future(agent.run(environment))
        await asyncio.sleep(3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and factory.closed == 1
        assert rollout.hub.replicas[0].load == 0 and rollout.event_loop.time() == 3.0
        assert len(agent.progress.actions) == 30, "what it made is still there"

    play(main)


def test_a_partial_of_the_first_turn_is_continued_and_not_made_again() -> None:
    async def main(rollout: Rollout) -> None:
        made = make_sample_group(0, 0, actions=70).samples[0].episode.turns[0].generation
        environment, _ = environment_of(100)
        episode = await make_agent(rollout, partial=made).run(environment)
        assert rollout.event_loop.time() == pytest.approx(3.0)
        assert len(episode.turns[0].generation.actions) == 100

    play(main)


def test_the_age_of_an_episode_is_that_of_the_replica_that_took_its_first_request() -> None:
    async def main(rollout: Rollout) -> None:
        environment, _ = environment_of(10, 10)
        agent = make_agent(rollout)
        assert agent.oldest is None
        task = asyncio.ensure_future(agent.run(environment))
        await asyncio.sleep(0.5)
        assert agent.oldest == 0
        await serve(rollout.hub.replicas[0].engine, 1)
        await asyncio.sleep(1)
        assert agent.oldest == 0, "also in a later turn"
        episode = await task
        assert [(part.version, part.count) for part in episode.runs] == [(0, 5), (1, 15)]

    play(main)


def test_a_partial_keeps_its_age() -> None:
    async def main(rollout: Rollout) -> None:
        await serve(rollout.hub.replicas[0].engine, 5)
        made = make_sample_group(0, 3, 4).samples[0].episode.turns[0].generation
        assert make_agent(rollout, partial=made).oldest == 3

    play(main)


def test_with_a_barrier_every_episode_waits_for_the_slowest_after_every_turn() -> None:
    async def main(rollout: Rollout) -> None:
        barrier, ends = TurnBarrier(), {}

        async def go(name: str, *turns: int) -> Episode:
            episode = await make_agent(rollout, name, barrier=barrier).run(environment_of(*turns)[0])
            ends[name] = round(rollout.event_loop.time(), 3)
            return episode

        await asyncio.gather(go("fast", 10, 10), go("slow", 30, 10), go("short", 5))
        assert ends == {"short": 0.5, "fast": 4.0, "slow": 4.0}

    play(main)
