"""RolloutLoop: starts the agents of groups, replaces failed members, scores samples and cancels surplus members.

Every member of a group is an asyncio task of its own, which plays its episode, delivers it, and then scores it, so that
scoring overlaps with everything else. A group is delivered as soon as enough members have finished; surplus members
are cancelled at once. A failed member is replaced a bounded number of times; then the whole group fails.

Guarantees: `on_group` or `on_failed` is called exactly once for every completion of a started group that was not
cancelled. The loop does not decide when a group may start (the staleness controller does), nor what happens afterwards.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from math import isfinite
from typing import Protocol

from headway.algorithm_traits import GREEDY_MARK, is_greedy_member
from headway.deadlines import run_with_pausable_deadline
from headway.environments.base import Environment, EnvironmentFactory, extract_outcome, list_tool_problems
from headway.errors import EngineCrashed, EngineError, EnvironmentFailed, RewardError
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport, SampleFinish, SampleStart, ScoreEnd, ScoreStart
from headway.monitor.wait_graph import WaitEdge
from headway.rewards.base import Reward, find_unfinished_terms
from headway.rollout.concurrency import TurnBarrier, spawn_task
from headway.rollout.environment_agent import PLACE, Decode, EnvironmentAgent, ReplayMismatch, is_cancelled
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import RequestLane
from headway.settings import RunSettings
from headway.types import DropReason, Episode, Generation, PartialGeneration, Score, Task

SCORES = "scores"
"""Name of all scores of training samples together, in the wait-for graph."""


class SampleRecorderProtocol(Protocol):
    """Records samples: in the ledger during training, nowhere during validation."""

    def start_sample(self, sample_id: str, group_id: int) -> None: ...
    def finish_sample(self, episode: Episode) -> None: ...
    def drop_sample(self, sample_id: str, reason: DropReason) -> None: ...
    def leave_sample(self, sample_id: str, length: int) -> None:
        """Note that nothing generates the sample any more, whose length is final."""


class RunningGroup:
    """One group from its start until it has its scores."""

    __slots__ = ("agents", "budget", "complete", "episodes", "fault", "group_id", "scores", "started", "task", "tasks")

    def __init__(self, group_id: int, task: Task, budget: int) -> None:
        self.group_id = group_id
        self.task = task
        self.budget = budget
        """How many failed members may still be replaced."""
        self.started = 0
        """Number of members started so far; it numbers their sample ids."""
        self.agents: dict[str, EnvironmentAgent] = {}
        """Agents of members that are not finished, by sample id."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.episodes: dict[str, Episode] = {}
        """Episodes of finished members, in the order in which they finished."""
        self.scores: dict[str, asyncio.Future[Score]] = {}
        self.complete = False
        self.fault = ""
        """Error message of the last member that failed."""

    def oldest(self, unstarted: int) -> int:
        """Return the oldest version among the tokens of the group. Members without a replica count as `unstarted`."""
        versions = [run.version for episode in self.episodes.values() for run in episode.runs]
        for agent in self.agents.values():
            versions.append(unstarted if agent.oldest is None else agent.oldest)
        return min(versions, default=unstarted)

    @property
    def has_greedy_member(self) -> bool:
        """Return whether one of the members, finished or not, answers greedily."""
        return any(map(is_greedy_member, (*self.episodes, *self.agents)))

    def known_scores(self) -> dict[str, Score]:
        """Return the scores that are there, by sample id."""
        done = {key: score for key, score in self.scores.items() if score.done() and not score.cancelled()}
        return {key: score.result() for key, score in done.items() if score.exception() is None}

    def partials(self) -> dict[str, PartialGeneration]:
        """Return the partial sequences of unfinished members by sample id."""
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
        recorder: SampleRecorderProtocol,
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
        self._settings, self._events, self._recorder = settings, events, recorder
        self._tasks, self._on_group, self._on_failed, self._lane = tasks, on_group, on_failed, lane
        self._who, self._prefix, self._decode = who, prefix, decode
        self._barrier = TurnBarrier() if settings.env_scheduling == "barrier" else None
        self._scoring: dict[str, tuple[int, float]] = {}
        """Samples whose reward is being computed: position of the task, and since when."""

    def start(self, group_id: int, task: Task) -> RunningGroup:
        """Start a group with its members and the redundant ones."""
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
        """Continue a group of an earlier process: finished members stay, the others continue or start again."""
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
        self._deliver_if_complete(run)
        return run

    def replace(self, run: RunningGroup, sample_id: str, reason: DropReason) -> None:
        """Start another member in place of a failed one, or fail the group when its replacements are used up."""
        run.episodes.pop(sample_id, None)
        run.agents.pop(sample_id, None)
        score = run.scores.pop(sample_id, None)
        if score is not None and score.done() and not score.cancelled() and score.exception():
            run.fault = str(score.exception())
        self._recorder.drop_sample(sample_id, reason)
        if run.budget <= 0:
            self.cancel(run.group_id)
            self._on_failed(run, DropReason.GROUP_FAILED)
            return
        run.budget -= 1
        run.complete = False
        if len(run.episodes) + len(run.agents) < self._settings.group_size:
            self._start_member(run)

    def cancel(self, group_id: int) -> None:
        """Cancel all work of a group. The caller records the end of its samples."""
        run = self.runs.pop(group_id, None)
        if run is None:
            return
        run.complete = True
        run.agents.clear()
        for task in list(run.tasks.values()):
            task.cancel()

    def close(self, group_id: int) -> None:
        """Forget a group that has all its scores."""
        self.runs.pop(group_id, None)

    def score(self, run: RunningGroup, episode: Episode) -> asyncio.Future[Score]:
        """Start to score a sample, unless that has begun. Return the future of its score."""
        future = run.scores.get(episode.sample_id)
        if future is None:
            future = run.scores[episode.sample_id] = asyncio.get_running_loop().create_future()
            self._track(run, f"{episode.sample_id}/score", self._score(episode, future))
        return future

    def waits(self) -> list[WaitEdge]:
        """Return edges of the wait-for graph: for every environment and reward the call that has lasted longest."""
        calls: dict[tuple[str, str], list[tuple[float, str]]] = {}
        queues: dict[tuple[str, str], list[tuple[float, str]]] = {}
        for run in self.runs.values():
            for sample_id, agent in run.agents.items():
                if agent.waits_for is not None:
                    what, since_s = agent.waits_for
                    name = f"environment {run.task.domain}".rstrip()
                    call = f"{what} of sample {sample_id} in turn {len(agent.turns) + 1}, task {run.task.position}"
                    found = queues if what == PLACE else calls
                    found.setdefault((self._who, name), []).append((since_s, call))
        for sample_id, (position, since_s) in self._scoring.items():
            owner = SCORES if self._lane is RequestLane.TRAIN else self._who
            for name in find_unfinished_terms(self._reward, sample_id):
                calls.setdefault((owner, name), []).append((since_s, f"reward of sample {sample_id}, task {position}"))
        return [
            WaitEdge(owner, f"{min(each)[1]}, the oldest of {len(each)}", name, min(each)[0])
            for (owner, name), each in {**queues, **calls}.items()  # whoever has a place keeps the others waiting
        ]

    # -- members

    def _open(self, group_id: int, task: Task) -> RunningGroup:
        budget = self._settings.reliability.sample_retries * self._settings.group_size
        run = self.runs[group_id] = RunningGroup(group_id, task, budget)
        return run

    def _start_member(self, run: RunningGroup) -> None:
        is_greedy = self._settings.has_greedy_member and not run.has_greedy_member
        sample_id = f"{self._prefix}{run.group_id}{GREEDY_MARK if is_greedy else '.'}{run.started}"
        run.started += 1
        self._recorder.start_sample(sample_id, run.group_id)
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
        """Run one member: play the episode, deliver it, score it."""
        try:
            episode = await self._episode(run, agent)
        except (EnvironmentFailed, EngineError) as error:
            reason = DropReason.ENGINE_FAILED if isinstance(error, EngineError) else DropReason.ENVIRONMENT_FAILED
            self._report_error(type(error).__name__, str(error))
            run.fault = str(error)
            if isinstance(error.__cause__, EngineCrashed):
                run.budget = 0  # replicas crashed on it again and again: the prompt may be the cause
            if run.agents.get(agent.sample_id) is agent:
                self.replace(run, agent.sample_id, reason)
            return
        finally:
            if agent.close_error:
                self._report_error(EnvironmentFailed.__name__, agent.close_error)
            self._recorder.leave_sample(agent.sample_id, agent.length)
        if run.agents.pop(agent.sample_id, None) is None:
            return  # cancelled in the same tick in which it finished: its end is already recorded
        self._finish_member(run, episode)
        if self._settings.with_reward:
            future = run.scores[episode.sample_id] = asyncio.get_running_loop().create_future()
            self._deliver_if_complete(run)
            await self._score(episode, future)
        else:
            self._deliver_if_complete(run)

    async def _episode(self, run: RunningGroup, agent: EnvironmentAgent) -> Episode:
        """Play an episode, continuing where an earlier process was; from the beginning if the environment differs."""
        try:
            return await agent.run(self._environment(run.task))
        except ReplayMismatch as error:
            self._report_error(type(error).__name__, str(error))
            agent.start_over()
            return await agent.run(self._environment(run.task))

    def _environment(self, task: Task) -> Environment:
        try:
            return self._environments(task)
        except Exception as error:
            raise EnvironmentFailed(f"no environment for task {task.position}: {error!r}") from error

    def _report_error(self, error: str, message: str) -> None:
        self._events.emit(ErrorReport(who=self._who, error=error, message=message))

    def _finish_member(self, run: RunningGroup, episode: Episode) -> None:
        run.episodes[episode.sample_id] = episode
        self._recorder.finish_sample(episode)
        for problem in list_tool_problems(episode.info):
            self._report_error("ToolFailed", f"{episode.sample_id}: {problem}")
        runs = episode.runs
        finish = SampleFinish(
            who=self._who,
            sample=episode.sample_id,
            actions=sum(part.count for part in runs),
            oldest=min((part.version for part in runs), default=-1),
            newest=max((part.version for part in runs), default=-1),
            **extract_outcome(episode.info),
        )
        self._events.emit(finish)

    def _deliver_if_complete(self, run: RunningGroup) -> None:
        """Deliver the group when enough members have finished, and cancel surplus members."""
        if run.complete or len(run.episodes) < self._settings.group_size:
            return
        run.complete = True
        for sample_id in list(run.agents):
            del run.agents[sample_id]
            self._recorder.drop_sample(sample_id, DropReason.SURPLUS_MEMBER)
            if sample_id in run.tasks:
                run.tasks[sample_id].cancel()
        self._on_group(run)

    # -- scoring

    async def _score(self, episode: Episode, future: asyncio.Future[Score]) -> None:
        """Set the score as the result of `future`; retry a bounded number of times."""
        retries = self._settings.reliability.sample_retries
        self._scoring[episode.sample_id] = episode.task.position, asyncio.get_running_loop().time()
        self._events.emit(ScoreStart(who="reward", sample=episode.sample_id))
        try:
            for attempt in range(retries + 1):
                try:
                    score = await self._judge(episode)
                except RewardError as error:
                    self._events.emit(ErrorReport.from_exception("reward", error))
                    if attempt == retries and not future.done():
                        future.set_exception(error)
                        future.exception()  # mark it as retrieved; whoever awaits the future gets it again
                else:
                    if not future.done():
                        future.set_result(score)
                    return
        finally:
            self._scoring.pop(episode.sample_id, None)
            future.cancel()
            self._events.emit(ScoreEnd(who="reward", sample=episode.sample_id))

    async def _judge(self, episode: Episode) -> Score:
        limit = self._settings.reliability.reward_timeout_s
        try:
            score = await run_with_pausable_deadline(limit, self._reward.score(episode))
            if not isfinite(score.value):
                raise RewardError(f"{episode.sample_id}: {score.value} is not a reward")
            return score
        except TimeoutError:
            raise RewardError(f"{episode.sample_id}: no score after {limit} s") from None
        except RewardError:
            raise
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise RewardError(f"{episode.sample_id}: the reward cancelled itself") from error
        except Exception as error:
            raise RewardError(f"{episode.sample_id}: {type(error).__name__}: {error}") from error
