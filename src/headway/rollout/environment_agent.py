"""EnvironmentAgent: one episode. Ask the hub, step the environment, until done.

A bad episode does not stop a run: whatever an environment raises becomes `EnvironmentFailed`. An episode that another
process had begun is replayed with the turns that were generated there, and then continues. If the environment answers
differently than it did then, the agent raises `ReplayMismatch`.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from headway.algorithm_traits import is_greedy_member
from headway.deadlines import run_with_deadline
from headway.engines.base import Progress, Request
from headway.environments.base import (
    Environment,
    LocatableEnvironment,
    Observation,
    find_concurrency_limit,
)
from headway.errors import EngineError, EnvironmentFailed
from headway.rollout.concurrency import TurnBarrier
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import RequestLane
from headway.settings import RunSettings
from headway.types import (
    Episode,
    FinishReason,
    Generation,
    PartialGeneration,
    SamplingParams,
    Task,
    Turn,
    concatenate_actions,
)

T = TypeVar("T")
Decode = Callable[[Sequence[Any]], str]
"""A function from actions to their text."""


PLACE = "a free place"
"""What an agent waits for while other episodes use all places of its environment."""


class ReplayMismatch(EnvironmentFailed):
    """An environment does not replay an episode as it went before, so the episode must start over."""


class EnvironmentAgent:
    """Runs the episode of one sample. `progress` belongs to the turn that is being generated."""

    __slots__ = (
        "_barrier", "_bound", "_current_generation", "_decode", "_expected_observation", "_hub", "_lane",
        "_observation", "_oldest", "_priority", "_replayed_turns", "_settings", "_spent_s", "close_error", "progress",
        "sample_id", "task", "turns", "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        *,
        sample_id: str,
        task: Task,
        hub: InferenceHub,
        settings: RunSettings,
        lane: RequestLane = RequestLane.TRAIN,
        priority: int = 0,
        bound: int | None = None,
        barrier: TurnBarrier | None = None,
        partial: Generation | None = None,
        decode: Decode | None = None,
    ) -> None:
        self.sample_id = sample_id
        self.task = task
        self.close_error = ""
        """Error message if the environment could not be closed; the episode counts all the same."""
        self.waits_for: tuple[str, float] | None = None
        """The call of the environment that is under way, and since when."""
        self.start_over()
        if partial is not None:
            self._restore(partial)
        self._hub, self._settings = hub, settings
        self._lane, self._priority, self._bound = lane, priority, bound
        self._barrier, self._decode = barrier, decode

    def start_over(self) -> None:
        self.turns: list[Turn] = []
        self.progress = Progress()
        self._spent_s = 0.0
        self._oldest: int | None = None
        self._current_generation: Generation | None = None
        """Generation of the current turn, once it is complete."""
        self._replayed_turns: tuple[Turn, ...] = ()
        """Turns that an earlier process generated."""
        self._expected_observation: Sequence[int] | None = None
        """Observation that followed those turns in the earlier process."""
        self._observation: Sequence[int] = ()
        """Observation of the current turn."""

    def _restore(self, partial: Generation) -> None:
        self.progress.actions, self.progress.logps = partial.actions, partial.logps
        self.progress.runs, self.progress.routing = partial.runs, partial.routing
        self.progress.started = min((run.version for run in partial.runs), default=None)
        if isinstance(partial, PartialGeneration):
            self._replayed_turns, self._expected_observation = partial.before, partial.observation
            made = (partial, *(turn.generation for turn in self._replayed_turns))
            self._oldest = min((run.version for generation in made for run in generation.runs), default=None)
            whole = partial.finish is not FinishReason.ABORTED
            self._current_generation = self.progress.generation(partial.finish, partial.text) if whole else None

    @property
    def _replaying(self) -> bool:
        return len(self.turns) < len(self._replayed_turns)

    @property
    def oldest(self) -> int | None:
        """Version of the replica that ran the first request. No token of the episode is older."""
        return self._oldest if self._oldest is not None else self.progress.started

    @property
    def length(self) -> int:
        """Number of actions of the episode so far."""
        return sum(len(turn.generation.actions) for turn in self.turns) + len(self.progress.actions)

    @property
    def partial(self) -> PartialGeneration | None:
        """State from which another process can continue; `None` if nothing was generated."""
        before = self._replayed_turns if self._replaying else tuple(self.turns)
        if not before and not len(self.progress.actions):
            return None
        seen = self._observation if self._expected_observation is None else self._expected_observation
        made = self._current_generation or self.progress.generation(FinishReason.ABORTED)
        return PartialGeneration.of(made, before=before, observation=seen)

    async def run(self, environment: Environment) -> Episode:
        """Play to the end and close the environment. Raise `EnvironmentFailed` or `EngineError`."""
        try:
            if (limited := find_concurrency_limit(environment)) is not None:
                self.waits_for = PLACE, asyncio.get_running_loop().time()
                await limited.enter()
                self.waits_for = None
            return await self._play_in_barrier(environment)
        finally:
            self._hub.end_session(self.sample_id)
            await self._close(environment)

    async def _play_in_barrier(self, environment: Environment) -> Episode:
        """Play as a member of the turn barrier, if there is one. Agents that wait for a place are no members."""
        if self._barrier is None:
            return await self._play(environment)
        self._barrier.enter()
        try:
            return await self._play(environment)
        finally:
            self._barrier.leave()

    async def _play(self, environment: Environment) -> Episode:
        observation = await self._guard("reset", environment, environment.reset(self.task))
        context: Sequence[Any] = ()
        while True:
            self._check_replay(observation)
            tokens = observation.tokens
            context = tokens if observation.starts_new_context else concatenate_actions(context, tokens)
            replayed = self._replaying
            generation = (
                self._replayed_turns[len(self.turns)].generation if replayed else await self._act(context, observation)
            )
            outcome = await self._guard("step", environment, environment.step(generation))
            turn = Turn(
                observation=observation.tokens,
                generation=generation,
                reward=outcome.reward,
                starts_new_context=observation.starts_new_context,
                state=observation.state,
            )
            if replayed and (turn.reward != self._replayed_turns[len(self.turns)].reward or outcome.done):
                raise self._make_mismatch("gives another reward, or ends the episode")
            self.turns.append(turn)
            if outcome.done:
                self._check_info(outcome.info)
                return Episode(
                    sample_id=self.sample_id,
                    task=self.task,
                    turns=tuple(self.turns),
                    truncated=outcome.truncated,
                    info=outcome.info,
                )
            context = concatenate_actions(context, generation.actions)
            observation, self._observation = outcome, outcome.tokens
            if replayed:
                continue
            self._spent_s += self.progress.spent_s
            self._oldest = self.oldest
            self.progress, self._current_generation = Progress(), None
            if self._spent_s > (limit := self._settings.reliability.episode_timeout_s):
                raise EnvironmentFailed(f"{self.sample_id}: not over after {len(self.turns)} turns and {limit} s")
            if self._barrier is not None:
                await self._barrier.arrive()

    def _check_replay(self, observation: Observation) -> None:
        """Raise `ReplayMismatch` unless a replayed episode shows the observation of the earlier process."""
        self._observation = observation.tokens
        expected = self._replayed_turns[len(self.turns)].observation if self._replaying else self._expected_observation
        if expected is not None and list(expected) != list(observation.tokens):
            raise self._make_mismatch("says something else")
        if not self._replaying:
            self._expected_observation = None

    def _make_mismatch(self, how: str) -> ReplayMismatch:
        turn, played = len(self.turns) + 1, len(self._replayed_turns)
        where = f"started over after {played} turns: in turn {turn}"
        return ReplayMismatch(f"{self.sample_id}: {where} the environment {how}")

    async def _act(self, context: Sequence[Any], observation: Observation) -> Generation:
        """Generate the answer of the policy; return the complete answer of an earlier process if there is one."""
        if self._current_generation is not None:
            return self._current_generation
        request = Request(
            request_id=f"{self.sample_id}/{len(self.turns)}",
            session=self.sample_id,
            prompt=context,
            params=_sampling_params(observation, self._settings.sampling, is_greedy_member(self.sample_id)),
            prefix_key=self._priority if observation.starts_new_context or not self.turns else -1,
            continues=observation.expects_next_turn,
            hint=observation.hint,
        )
        if self.turns and not observation.starts_new_context:  # the last token of a turn is first computed in the next
            self.progress.routing_start = len(context) - len(observation.tokens) - 1
        lane, priority, bound = self._lane, self._priority, self._bound
        finish = await self._hub.generate(request, self.progress, lane=lane, priority=priority, bound=bound)
        self._current_generation = self.progress.generation(finish, self._text())
        return self._current_generation

    def _text(self) -> str:
        if self._decode is None:
            return ""
        try:
            return self._decode(self.progress.actions)
        except Exception as error:
            raise EngineError(f"{self.sample_id}: what was generated cannot be decoded: {error!r}") from error

    def _check_info(self, info: Mapping[str, Any]) -> None:
        """Raise `EnvironmentFailed` unless the information about the episode can be stored as JSON."""
        try:
            if info:
                json.dumps(dict(info))
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed(f"{self.sample_id}: info is not JSON: {error}") from error

    async def _guard(self, what: str, environment: Environment, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of the environment. Raise `EnvironmentFailed` if it fails or is late."""
        limit, clock = self._settings.reliability.environment_timeout_s, asyncio.get_running_loop().time
        began_s = clock()
        self.waits_for = what, began_s
        try:
            answer = await run_with_deadline(limit, call)
            self._spent_s += clock() - began_s
            return answer
        except TimeoutError:
            where = await environment.locate() if isinstance(environment, LocatableEnvironment) else ""
            raise EnvironmentFailed(f"{self.sample_id}: no answer to {what} after {limit} s{where}") from None
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"{self.sample_id}: {what}: {error}") from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise EnvironmentFailed(f"{self.sample_id}: {what} cancelled itself") from error
        except Exception as error:
            raise EnvironmentFailed(f"{self.sample_id}: {what} raised {type(error).__name__}: {error}") from error
        finally:
            self.waits_for = None

    async def _close(self, environment: Environment) -> None:
        """Close the environment. Store an error in `close_error`."""
        try:
            await run_with_deadline(self._settings.reliability.abort_timeout_s, environment.close())
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self.close_error = f"{self.sample_id}: close cancelled itself"
        except Exception as error:
            self.close_error = f"{self.sample_id}: close raised {type(error).__name__}: {error}"


def _sampling_params(observation: Observation, usual: SamplingParams, is_greedy: bool) -> SamplingParams:
    params, most = observation.params or usual, observation.max_new_tokens
    if is_greedy:
        params = replace(params, temperature=0.0)
    if most is not None and most < params.max_new_tokens:
        params = replace(params, max_new_tokens=most)
    return replace(params, stop=(*params.stop, *observation.stop)) if observation.stop else params


def is_cancelled() -> bool:
    """Return whether this task was cancelled from outside, as opposed to code in it that raised `CancelledError`."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
