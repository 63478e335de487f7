"""RolloutLoop: keeps the agents fed.

Every member of a group is a task of its own that plays its episode, hands it in, and then scores it, so that
scoring overlaps with everything else. A group is handed on the moment enough members are in; the surplus is
cancelled at once. A failed member is replaced within the group's budget; beyond it the group is given up.

Guarantees: `on_group` or `on_failed` is called exactly once for every completion of a started group that was not
cancelled. Does not decide when a group may start (that is `headway`) nor what happens to it afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from math import isfinite
from typing import Protocol

from headway.environments.base import Environment, EnvironmentFactory, extract_outcome
from headway.errors import EngineCrashed, EngineError, EnvironmentFailed, RewardError
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport, SampleFinish, SampleStart, ScoreEnd, ScoreStart
from headway.rewards.base import Reward
from headway.rollout.concurrency import TurnBarrier, run_with_deadline, spawn_task
from headway.rollout.environment_agent import Decode, EnvironmentAgent, ReplayMismatch, is_cancelled
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import RequestLane
from headway.settings import RunSettings
from headway.types import DropReason, Episode, Generation, PartialGeneration, Score, Task


class SampleRecorderProtocol(Protocol):
    """Where samples are written down; the ledger, or nothing for validation."""

    def start_sample(self, sample_id: str, group_id: int) -> None: ...
    def finish_sample(self, episode: Episode) -> None: ...
    def drop_sample(self, sample_id: str, reason: DropReason) -> None: ...


class RunningGroup:
    """One group from start to hand-over, and its scores until it is closed."""

    __slots__ = ("agents", "budget", "complete", "episodes", "fault", "group_id", "scores", "started", "task", "tasks")

    def __init__(self, group_id: int, task: Task, budget: int) -> None:
        self.group_id = group_id
        self.task = task
        self.budget = budget
        """Members that may still be replaced."""
        self.started = 0
        """Members started so far; numbers their sample ids."""
        self.agents: dict[str, EnvironmentAgent] = {}
        """Members still playing."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.episodes: dict[str, Episode] = {}
        """Members that are in, in the order they came in."""
        self.scores: dict[str, asyncio.Future[Score]] = {}
        self.complete = False
        self.fault = ""
        """What the last member that failed had to say."""

    def oldest(self, unstarted: int) -> int:
        """The oldest version at work in the group; `unstarted` stands for members without a replica yet."""
        versions = [run.version for episode in self.episodes.values() for run in episode.runs]
        for agent in self.agents.values():
            versions.append(unstarted if agent.oldest is None else agent.oldest)
        return min(versions, default=unstarted)

    def partials(self) -> dict[str, PartialGeneration]:
        """What members still playing have made so far."""
        found = {sample_id: agent.partial for sample_id, agent in self.agents.items()}
        return {sample_id: partial for sample_id, partial in found.items() if partial is not None}


class RolloutLoop:
    """Starts, replaces, scores and cancels the members of groups, as tasks of the given task group."""

    def __init__(
        self,
        *,
        hub: InferenceHub,
        environments: EnvironmentFactory,
        reward: Reward,
        settings: RunSettings,
        events: EventLog,
        book: SampleRecorderProtocol,
        tasks: asyncio.TaskGroup,
        on_group: Callable[[RunningGroup], None],
        on_failed: Callable[[RunningGroup, DropReason], None],
        lane: RequestLane = RequestLane.TRAIN,
        who: str = "generate",
        prefix: str = "",
        decode: Decode | None = None,
    ) -> None:
        self.runs: dict[int, RunningGroup] = {}
        self._hub, self._environments, self._reward = hub, environments, reward
        self._settings, self._events, self._book = settings, events, book
        self._tasks, self._on_group, self._on_failed, self._lane = tasks, on_group, on_failed, lane
        self._who, self._prefix, self._decode = who, prefix, decode
        self._barrier = TurnBarrier() if settings.env_scheduling == "barrier" else None

    def start(self, group_id: int, task: Task) -> RunningGroup:
        """Begin a group: its members and the spare ones."""
        run = self._open(group_id, task)
        for _ in range(self._settings.group_size + self._settings.redundant_members):
            self._start_member(run)
        return run

    def restore(
        self,
        group_id: int,
        task: Task,
        *,
        started: int,
        episodes: Mapping[str, Episode],
        unfinished: Mapping[str, Generation | None],
        scores: Mapping[str, Score],
    ) -> RunningGroup:
        """Go on with a group of an earlier process: members that are in stay in, the others play on or again."""
        run = self._open(group_id, task)
        run.started = started
        run.episodes.update(episodes)
        for sample_id, score in scores.items():
            run.scores[sample_id] = asyncio.get_running_loop().create_future()
            run.scores[sample_id].set_result(score)
        for sample_id, partial in unfinished.items():
            self._spawn(run, sample_id, partial)
        while len(run.episodes) + len(run.agents) < self._settings.group_size:
            self._start_member(run)
        for episode in episodes.values():
            if self._settings.with_reward:
                self.score(run, episode)
        self._hand_over_if_full(run)
        return run

    def replace(self, run: RunningGroup, sample_id: str, reason: DropReason) -> None:
        """A member has failed: start another for it, or give the group up when the budget is spent."""
        run.episodes.pop(sample_id, None)
        run.agents.pop(sample_id, None)
        verdict = run.scores.pop(sample_id, None)
        if verdict is not None and verdict.done() and not verdict.cancelled() and verdict.exception():
            run.fault = str(verdict.exception())
        self._book.drop_sample(sample_id, reason)
        if run.budget <= 0:
            self.cancel(run.group_id)
            self._on_failed(run, DropReason.GROUP_FAILED)
            return
        run.budget -= 1
        run.complete = False
        if len(run.episodes) + len(run.agents) < self._settings.group_size:
            self._start_member(run)

    def cancel(self, group_id: int) -> None:
        """Stop everything a group still does. What becomes of its samples is the caller's to record."""
        run = self.runs.pop(group_id, None)
        if run is None:
            return
        run.complete = True
        run.agents.clear()
        for task in list(run.tasks.values()):
            task.cancel()

    def close(self, group_id: int) -> None:
        """Forget a group that has its scores."""
        self.runs.pop(group_id, None)

    def score(self, run: RunningGroup, episode: Episode) -> asyncio.Future[Score]:
        """Start scoring a sample, once; the future is the verdict."""
        future = run.scores.get(episode.sample_id)
        if future is None:
            future = run.scores[episode.sample_id] = asyncio.get_running_loop().create_future()
            self._track(run, f"{episode.sample_id}/score", self._score(episode, future))
        return future

    # -- members

    def _open(self, group_id: int, task: Task) -> RunningGroup:
        budget = self._settings.reliability.sample_retries * self._settings.group_size
        run = self.runs[group_id] = RunningGroup(group_id, task, budget)
        return run

    def _start_member(self, run: RunningGroup) -> None:
        sample_id = f"{self._prefix}{run.group_id}.{run.started}"
        run.started += 1
        self._book.start_sample(sample_id, run.group_id)
        self._events.emit(SampleStart(who=self._who, sample=sample_id))
        self._spawn(run, sample_id, None)

    def _spawn(self, run: RunningGroup, sample_id: str, partial: Generation | None) -> None:
        agent = EnvironmentAgent(
            sample_id=sample_id,
            task=run.task,
            hub=self._hub,
            settings=self._settings,
            lane=self._lane,
            priority=run.group_id,
            bound=None if self._settings.is_num_return_sequences_expand else run.group_id,
            barrier=self._barrier,
            partial=partial,
            decode=self._decode,
        )
        run.agents[sample_id] = agent
        self._track(run, sample_id, self._play(run, agent))

    def _track(self, run: RunningGroup, name: str, coroutine: Coroutine[None, None, None]) -> None:
        task = spawn_task(self._tasks, coroutine, name)
        if task is not None:
            run.tasks[name] = task
            task.add_done_callback(lambda _: run.tasks.pop(name, None))

    async def _play(self, run: RunningGroup, agent: EnvironmentAgent) -> None:
        """One member: episode, hand-over, verdict."""
        try:
            episode = await self._episode(run, agent)
        except (EnvironmentFailed, EngineError) as error:
            reason = DropReason.ENGINE_FAILED if isinstance(error, EngineError) else DropReason.ENVIRONMENT_FAILED
            self._complain(type(error).__name__, str(error))
            run.fault = str(error)
            if isinstance(error.__cause__, EngineCrashed):
                run.budget = 0  # replicas died under it again and again: it may well be the prompt
            if run.agents.get(agent.sample_id) is agent:
                self.replace(run, agent.sample_id, reason)
            return
        finally:
            if agent.complaint:
                self._complain(EnvironmentFailed.__name__, agent.complaint)
        if run.agents.pop(agent.sample_id, None) is None:
            return  # cancelled in the very tick in which it ended: its end is recorded already
        self._hand_in(run, episode)
        if self._settings.with_reward:
            future = run.scores[episode.sample_id] = asyncio.get_running_loop().create_future()
            self._hand_over_if_full(run)
            await self._score(episode, future)
        else:
            self._hand_over_if_full(run)

    async def _episode(self, run: RunningGroup, agent: EnvironmentAgent) -> Episode:
        """Played on where an earlier process was, or from the beginning where that cannot be."""
        try:
            return await agent.run(self._environment(run.task))
        except ReplayMismatch as error:
            self._complain(type(error).__name__, str(error))
            agent.begin_anew()
            return await agent.run(self._environment(run.task))

    def _environment(self, task: Task) -> Environment:
        try:
            return self._environments(task)
        except Exception as error:
            raise EnvironmentFailed(f"no environment for task {task.position}: {error!r}") from error

    def _complain(self, error: str, message: str) -> None:
        self._events.emit(ErrorReport(who=self._who, error=error, message=message))

    def _hand_in(self, run: RunningGroup, episode: Episode) -> None:
        run.episodes[episode.sample_id] = episode
        self._book.finish_sample(episode)
        runs = episode.runs
        self._events.emit(
            SampleFinish(
                who=self._who,
                sample=episode.sample_id,
                actions=sum(part.count for part in runs),
                oldest=min((part.version for part in runs), default=-1),
                newest=max((part.version for part in runs), default=-1),
                **extract_outcome(episode.info),
            )
        )

    def _hand_over_if_full(self, run: RunningGroup) -> None:
        """Hand the group on when enough members are in, and cancel the surplus."""
        if run.complete or len(run.episodes) < self._settings.group_size:
            return
        run.complete = True
        for sample_id in list(run.agents):
            del run.agents[sample_id]
            self._book.drop_sample(sample_id, DropReason.SURPLUS_MEMBER)
            if sample_id in run.tasks:
                run.tasks[sample_id].cancel()
        self._on_group(run)

    # -- scoring

    async def _score(self, episode: Episode, future: asyncio.Future[Score]) -> None:
        """The verdict into `future`, tried again within the budget."""
        retries = self._settings.reliability.sample_retries
        self._events.emit(ScoreStart(who="reward", sample=episode.sample_id))
        try:
            for attempt in range(retries + 1):
                try:
                    verdict = await self._judge(episode)
                except RewardError as error:
                    self._events.emit(ErrorReport.from_exception("reward", error))
                    if attempt == retries and not future.done():
                        future.set_exception(error)
                        future.exception()  # looked at: whoever needs the verdict will see it again
                else:
                    if not future.done():
                        future.set_result(verdict)
                    return
        finally:
            future.cancel()
            self._events.emit(ScoreEnd(who="reward", sample=episode.sample_id))

    async def _judge(self, episode: Episode) -> Score:
        limit = self._settings.reliability.reward_timeout_s
        try:
            verdict = await run_with_deadline(limit, self._reward.score(episode))
            if not isfinite(verdict.value):
                raise RewardError(f"{episode.sample_id}: {verdict.value} is not a reward")
            return verdict
        except TimeoutError:
            raise RewardError(f"{episode.sample_id}: no verdict after {limit} s") from None
        except RewardError:
            raise
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise RewardError(f"{episode.sample_id}: the reward cancelled itself") from error
        except Exception as error:
            raise RewardError(f"{episode.sample_id}: {type(error).__name__}: {error}") from error
