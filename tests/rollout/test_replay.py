"""Episodes that another process had begun: played again up to where they were, then on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headway.environments.base import Observation
from headway.ledger import Ledger
from headway.ledger.ledger_records import decode_generation, encode_generation
from headway.rollout.replica import RequestLane
from headway.types import Episode, FinishReason, Generation, PartialGeneration, Task, Turn, VersionRun
from tests.ledger.factory import make_generation, start_group
from tests.rollout.factory import Rollout
from tests.rollout.test_agent import make_agent, play

TURNS, STEP_S = 4, 2.0


class Told:
    """Says what it was told: turns of ten actions, steps of two seconds. `odd`: the turn in which it is another one."""

    def __init__(self, odd: int = -1) -> None:
        self._odd, self.steps, self.closed = odd, 0, 0

    async def reset(self, task: Task) -> Observation:
        return Observation(tokens=(100 + (self._odd == 0),), hint=10)

    async def step(self, generation: Generation) -> Observation:
        await asyncio.sleep(STEP_S)
        self.steps += 1
        said = (self.steps, len(generation.actions) + (self._odd == self.steps))
        return Observation(tokens=said, hint=10, reward=float(self.steps), done=self.steps == TURNS)

    async def close(self) -> None:
        self.closed += 1


class Worlds:
    """The first environment of a task is another one in turn `odd`."""

    def __init__(self, odd: int = -1) -> None:
        self._odd, self.made = odd, list[Told]()

    def __call__(self, task: Task) -> Told:
        self.made.append(Told(-1 if self.made else self._odd))
        return self.made[-1]


async def interrupted(rollout: Rollout, at_s: float) -> PartialGeneration:
    """An episode of which the process was lost: what it had after so many seconds, as the ledger keeps it."""
    agent = make_agent(rollout)
    task = asyncio.ensure_future(agent.run(Told()))
    await asyncio.sleep(at_s)
    await rollout.hub.pause(RequestLane.TRAIN)
    await asyncio.sleep(0.2)  # the engine stops at an action
    partial = agent.partial
    task.cancel()
    await asyncio.wait([task])
    rollout.hub.resume(RequestLane.TRAIN)
    assert partial is not None
    kept = decode_generation(encode_generation(partial))
    assert isinstance(kept, PartialGeneration) and kept.before == partial.before and kept.finish == partial.finish
    return kept


def restored(rollout: Rollout, partial: PartialGeneration) -> None:
    rollout.loop.restore(0, Task(position=0), started=1, episodes={}, unfinished={"0.0": partial}, scores={})


def the_episode(rollout: Rollout) -> Episode:
    (run, _), *others = rollout.groups
    assert not others
    return run.episodes["0.0"]


@pytest.mark.parametrize(
    ("at_s", "turns", "actions", "left_s"),
    [
        (0.45, 0, 5, 0.5 + STEP_S + 3 * (1 + STEP_S)),
        (3.55, 1, 6, STEP_S + 0.4 + STEP_S + 2 * (1 + STEP_S)),  # the first turn is stepped again, not made again
        (5.0, 1, 10, STEP_S + STEP_S + 2 * (1 + STEP_S)),  # the second turn is whole, its step was under way
    ],
)
def test_an_episode_goes_on_in_the_turn_it_was_in(at_s: float, turns: int, actions: int, left_s: float) -> None:
    async def main(rollout: Rollout) -> None:
        partial = await interrupted(rollout, at_s)
        assert (len(partial.before), len(partial.actions)) == (turns, actions)
        assert (partial.finish is FinishReason.ABORTED) == (actions < 10)
        began_s = rollout.event_loop.time()
        restored(rollout, partial)
        await rollout.full.wait()
        assert rollout.event_loop.time() - began_s == pytest.approx(left_s, abs=0.06)
        episode = the_episode(rollout)
        assert [tuple(turn.observation) for turn in episode.turns] == [(100,), (1, 10), (2, 10), (3, 10)]
        assert [turn.reward for turn in episode.turns] == [1.0, 2.0, 3.0, 4.0]
        assert all(type(turn.generation) is Generation for turn in episode.turns)
        assert [len(turn.generation.actions) for turn in episode.turns] == [10] * TURNS
        asked = [event.data["request"] for event in rollout.events if event.kind == "request.start"]
        made = TURNS - turns - (actions == 10)
        assert len(asked) == turns + 1 + made, "before, and after"
        assert not [event for event in rollout.events if event.kind == "error"]

    play(main, environments=Worlds(), group_size=1)


@pytest.mark.parametrize(("odd", "turn"), [(0, 1), (1, 2), (2, 3)])
def test_an_environment_that_says_something_else_begins_anew_with_a_reason(odd: int, turn: int) -> None:
    worlds = Worlds(odd)

    async def main(rollout: Rollout) -> None:
        partial = await interrupted(rollout, 6.55)  # in the third turn
        began_s = rollout.event_loop.time()
        restored(rollout, partial)
        await rollout.full.wait()
        assert rollout.event_loop.time() - began_s == pytest.approx(odd * STEP_S + TURNS * (1 + STEP_S), abs=0.06)
        (problem,) = [event.data for event in rollout.events if event.kind == "error"]
        assert problem["error"] == "ReplayMismatch"
        assert problem["message"] == (
            f"0.0: started over after 2 turns: in turn {turn} the environment says something else"
        )
        assert [tuple(one.observation) for one in the_episode(rollout).turns] == [(100,), (1, 10), (2, 10), (3, 10)]
        assert not rollout.book.dropped, "it is the same sample"
        assert [world.closed for world in worlds.made] == [1, 1]

    play(main, environments=worlds, group_size=1)


def test_what_is_being_played_again_can_be_kept_again() -> None:
    async def main(rollout: Rollout) -> None:
        partial = await interrupted(rollout, 6.55)
        agent = make_agent(rollout, partial=partial)
        task = asyncio.ensure_future(agent.run(Told()))
        for _ in range(3):
            assert agent.partial == partial
            await asyncio.sleep(1.5)
        task.cancel()
        await asyncio.wait([task])

    play(main)


def test_an_episode_is_as_old_as_the_oldest_of_its_actions() -> None:
    def turn(*versions: int) -> Turn:
        return Turn(observation=(), generation=make_generation(*versions))

    async def main(rollout: Rollout) -> None:
        partial = PartialGeneration.of(make_generation(2), before=(turn(5, 4), turn(3)), observation=())
        assert make_agent(rollout, partial=partial).oldest == 2, "renumbered ones need not ascend"
        assert make_agent(rollout, partial=replace(partial, runs=(), actions=(), logps=())).oldest == 3

    play(main)


def test_turns_of_lost_weights_are_renumbered_with_the_rest() -> None:
    ledger = Ledger(":memory:")
    start_group(ledger, 0, 1)
    before = (
        Turn(observation=(1, 2), generation=make_generation(5, 6), reward=0.5, starts_new_context=True, state="here"),
    )
    partial = PartialGeneration.of(make_generation(6, 7), before=before, observation=(3,))
    ledger.store_partials({"0/0": partial})
    (group,) = ledger.restore(5).groups
    found: Any = group.partials["0/0"]
    assert [run.version for run in found.before[0].generation.runs] == [5, 4]
    assert [run.version for run in found.runs] == [4, 3]
    runs = (VersionRun(version=5, count=1), VersionRun(version=6, count=1))
    assert replace(found.before[0], generation=replace(found.before[0].generation, runs=runs)) == before[0]
    assert found.observation == (3,)
