"""Rewards of users in worker processes, so that nothing they do takes the run with them.

A worker loads one function or class and judges up to `concurrency` samples at a time: functions on threads, coroutines
on its event loop. It is killed with everything below it when it uses too much memory, prints without end, or when a
call takes too long and cannot be stopped. What it prints goes to a log.

When a worker ends, nobody knows which of its calls was to blame. So each sample that was with others is judged once
more, alone in a worker of its own: only those fail that are to blame.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headway.codec import JsonValue
from headway.deadlines import pause_deadline
from headway.errors import ConfigError, RewardError
from headway.processes.base import ChildSpec, PeerFailed, PeerLost
from headway.processes.child_process import ChildProcess, spawn_isolated
from headway.processes.loop_thread import make_ordinary
from headway.processes.stack_dumps import (
    describe_coroutine,
    describe_thread,
    find_busy_line,
    summarise_end,
    write_stacks_on_request,
)
from headway.processes.worker_guard import WorkerGuard
from headway.rewards.base import get_task_data
from headway.rewards.thread_limiter import CallSlots
from headway.rewards.user_function import FunctionTraits, LoadedFunction, load_function
from headway.types import Episode, Score
from headway.user_code import WorkingDirectory, import_object

START_TIMEOUT_S = 300.0
"""How long a worker may take to start and to load what it judges with."""
MAX_PRINTED_BYTES = 16 << 20
_ANSWER_S = 1.0
"""How long a worker that is not blocked may take to answer."""
_MAX_COROUTINES = 256
_MAX_ALONE = 4
"""Workers that judge one sample alone, at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRewardSpec:
    """Describes a user's reward and the limits of its workers."""

    name: str
    path: str
    """What a worker imports."""
    traits: FunctionTraits
    arguments: Mapping[str, Any]
    answer: str
    """Column of the task's answer."""
    concurrency: int = 8
    timeout_s: float = 600.0
    memory_mb: int = 0
    log: Path | None = None


class _WorkerFailed(Exception):
    """A call has no answer. `had_company`: other calls of the worker may be to blame."""

    def __init__(self, problem: str, *, had_company: bool) -> None:
        super().__init__(problem)
        self.had_company = had_company


class WorkerReward:
    """A user's function or class in a worker process, which is started by the first sample or by `start`."""

    def __init__(self, spec: UserRewardSpec) -> None:
        self._spec = spec
        self._slots = CallSlots(_MAX_COROUTINES if spec.traits.is_coroutine else spec.concurrency)
        self._alone = asyncio.Semaphore(_MAX_ALONE)
        self._starting = asyncio.Lock()
        self._worker: _Worker | None = None

    async def start(self) -> None:
        """Start the worker. Raises `ConfigError` if it cannot load what it judges with."""
        await self._get_worker()

    def close(self) -> None:
        """End the worker. Another sample would start another one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    async def score(self, episode: Episode) -> Score:
        with pause_deadline():
            if self._spec.traits.is_coroutine:
                return await self._slots.run_cancellable(lambda: self._judge(episode))
            return await self._slots.run(lambda: self._judge(episode))

    async def _judge(self, episode: Episode) -> Score:
        message = self._make_message(episode)
        try:
            return await (await self._get_worker()).judge(message, self._spec.timeout_s)
        except _WorkerFailed as failed:
            if not failed.had_company:
                raise self._make_error(episode, failed) from None
        except ConfigError as error:
            raise self._make_error(episode, error) from error
        async with self._alone:
            worker = await _Worker.start(self._spec)
            try:
                return await worker.judge(message, self._spec.timeout_s)
            except _WorkerFailed as failed:
                raise self._make_error(episode, failed) from None
            finally:
                worker.kill()

    def _make_message(self, episode: Episode) -> tuple[Any, ...]:
        """Return sample, subject and data. An episode travels without its data, which JSON keeps as it is."""
        subject, data = self._spec.traits.select_subject(episode), JsonValue(get_task_data(episode))
        if isinstance(subject, Episode):
            subject = replace(subject, task=replace(subject.task, data={}))
        return episode.sample_id, subject, data

    def _make_error(self, episode: Episode, error: Exception) -> RewardError:
        return RewardError(f"{self._spec.name}: {error} ({episode.sample_id})")

    async def _get_worker(self) -> _Worker:
        if self._worker is None or not self._worker.can_answer():
            async with self._starting:
                if self._worker is None or not self._worker.can_answer():
                    self._worker = await _Worker.start(self._spec)
        return self._worker


class _Worker:
    """One process, used by many calls at a time."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._calls = self._started_calls = 0
        self._is_retired = False
        """Whether it gets no more calls. It ends with its last one."""
        self._examining, self._busy_line = asyncio.Lock(), ""

    @classmethod
    async def start(cls, spec: UserRewardSpec) -> _Worker:
        child_spec = ChildSpec(
            name="its worker",
            target=f"{__name__}:load_in_worker",
            host=f"{__name__}:UserRewardServer",
            args={
                "name": spec.name,
                "path": spec.path,
                "arguments": JsonValue(dict(spec.arguments)),
                "answer": spec.answer,
                "threads": 0 if spec.traits.is_coroutine else spec.concurrency,
            },
            threads=None,
            contained=True,
            output_limit=MAX_PRINTED_BYTES,
            memory_mb=spec.memory_mb,
            log=spec.log,
        )
        try:
            return cls(await ChildProcess.start(child_spec, START_TIMEOUT_S, spawn=spawn_isolated(("-s", "-P"))))
        except (PeerLost, PeerFailed) as error:
            raise ConfigError(f"cannot be loaded in a worker process: {summarise_end(str(error))}") from error

    def can_answer(self) -> bool:
        """Return whether it takes calls of the event loop that runs now."""
        return not self._is_retired and self._child.alive and self._loop is asyncio.get_running_loop()

    def kill(self) -> None:
        self._is_retired = True
        if not self._loop.is_closed():
            self._child.kill()

    async def judge(self, message: tuple[Any, ...], timeout_s: float) -> Score:
        """Return the score of one sample. Raises `RewardError` if the function failed, else `_WorkerFailed`."""
        number, had_company = self._started_calls, self._calls > 0
        self._started_calls += 1
        self._calls += 1
        answer = asyncio.ensure_future(self._child.call("judge", number, *message))
        try:
            await asyncio.wait({answer}, timeout=timeout_s)
            if not answer.done():
                problem, is_blocked = await self._examine(number, timeout_s)
                had_company = is_blocked and (had_company or self._started_calls > number + 1)
                raise _WorkerFailed(problem, had_company=had_company)
            score: Score = answer.result()
            return score
        except PeerLost as error:
            had_company = had_company or self._started_calls > number + 1
            raise _WorkerFailed(summarise_end(str(error)), had_company=had_company) from None
        except PeerFailed as error:
            raise _WorkerFailed(str(error), had_company=False) from None
        finally:
            answer.cancel()
            self._calls -= 1
            if self._is_retired and not self._calls:
                self.kill()

    async def _examine(self, number: int, timeout_s: float) -> tuple[str, bool]:
        """Retire a worker with a late call; return where the call is and whether it blocks the others."""
        self._is_retired, late = True, f"no verdict after {timeout_s:g} s"
        try:
            async with asyncio.timeout(_ANSWER_S):
                return f"{late}{await self._child.call('locate', number)}", False
        except (TimeoutError, PeerLost, PeerFailed):
            async with self._examining:  # all calls of a blocked worker are late at about the same time
                if self._child.alive:
                    self._busy_line = find_busy_line(await self._child.dump_stacks())
                    self.kill()
            return f"{late}: it blocks its process{self._busy_line}", True


# What follows runs in the worker.


def load_in_worker(args: Mapping[str, Any]) -> tuple[LoadedFunction, int]:
    """Import what the worker judges with, and return it with the number of threads."""
    write_stacks_on_request()
    try:
        found = import_object(args["path"], key="reward_fn", kind="function")
        return load_function(found, args["name"], args["arguments"], args["answer"]), args["threads"]
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"{args['name']}: {type(error).__name__}: {error}") from error


class UserRewardServer:
    """Answers calls in a worker."""

    def __init__(self, served: tuple[LoadedFunction, int], send_note: Callable[[Any], None]) -> None:
        self._loaded, threads = served
        self._threads = ThreadPoolExecutor(max(1, threads), "reward")
        self._directory, self._guard = WorkingDirectory(self._loaded.name), WorkerGuard()
        self._places: dict[int, Callable[[], str]] = {}
        """Functions that say where a call is, by its number."""

    async def judge(self, number: int, sample_id: str, subject: Any, data: Mapping[str, Any]) -> Score:
        if isinstance(subject, Episode):
            subject = replace(subject, task=replace(subject.task, data=data))
        try:
            if self._loaded.traits.is_coroutine:
                result = await self._await(number, self._loaded.call(subject, data))
            else:
                call = partial(self._call_on_thread, number, subject, data)
                result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
                if inspect.isawaitable(result):
                    result = await self._await(number, result)
            return self._loaded.make_score(result, sample_id)
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if not isinstance(error, RewardError):
                traceback.print_exception(error)
            raise self._loaded.make_error(error, sample_id) from error
        finally:
            self._places.pop(number, None)
            self._guard.check()
            self._directory.restore()

    async def locate(self, number: int) -> str:
        """Return where a call is."""
        return self._places.get(number, str)()

    async def close(self) -> None:
        """Do nothing: whoever asks ends the process."""

    def _call_on_thread(self, number: int, subject: Any, data: Mapping[str, Any]) -> Any:
        self._places[number] = partial(describe_thread, threading.get_ident())
        try:
            return self._loaded.call(subject, data)
        except BaseException as error:
            raise make_ordinary(error) from error
        finally:
            self._guard.check()

    async def _await(self, number: int, result: Awaitable[Any]) -> Any:
        self._places[number] = partial(describe_coroutine, result)
        return await result
