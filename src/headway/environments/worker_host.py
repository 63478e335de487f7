"""Runs environments in worker processes, which can be killed.

Guarantees: at most `workers` processes with `episodes_per_worker` episodes each. A worker that dies takes only its own
episodes with it; each of them fails with the exit status and the last output of the worker. A worker is killed and
replaced if a call hangs after its episode was abandoned, if it prints without end, or if it uses too much memory.
Processes that an environment has started end with its worker. Workers end with this process, however it ends.

A worker that dies with several episodes inside is followed by workers with fewer, so that an environment that crashes
now and then takes few others with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

from headway.codec import JsonValue
from headway.environments.environment_output import MAX_PRINTED_CHARACTERS
from headway.environments.environment_registry import make_environment
from headway.environments.local_host import LocalEnvironmentHost, LocalEpisodeSlot
from headway.environments.text_environment import EnvironmentTraits, Reply
from headway.errors import EnvironmentFailed, HeadwayError
from headway.processes.base import ChildSpec, PeerFailed, PeerLost
from headway.processes.child_process import ChildProcess, spawn_isolated
from headway.processes.stack_dumps import find_busy_line, summarise_end, write_stacks_on_request
from headway.processes.worker_guard import WorkerGuard
from headway.user_code import WorkingDirectory

_RELEASE_TIMEOUT_S = 3.0
"""How long a worker may take to release an episode."""
_START_TIMEOUT_S = 300.0
_ANSWER_S = 1.0
"""How long a worker whose event loop is not blocked may take to answer."""
_MOST_WORKERS = 16
"""Most processes that the episodes of one environment are spread over after a crash."""


class WorkerEnvironmentHost:
    """Hosts all environments of one kind in worker processes."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        workers: int,
        episodes_per_worker: int = 1,
        max_episodes: int | None = None,
        memory_mb: int = 0,
    ) -> None:
        self.name, self._options, self._memory_mb = name, dict(options), memory_mb
        self._episodes_per_worker = episodes_per_worker
        self.max_episodes = min(max_episodes or workers * episodes_per_worker, workers * episodes_per_worker)
        """Largest number of episodes at once."""
        self.admission = asyncio.Semaphore(self.max_episodes)
        self._workers: list[EnvironmentWorker] = []
        self._releasing: set[asyncio.Task[None]] = set()

    def make_slot(self) -> WorkerEpisodeSlot:
        """Return a slot for one episode."""
        return WorkerEpisodeSlot(self)

    async def close(self) -> None:
        """Stop all workers."""
        await asyncio.gather(*self._releasing, return_exceptions=True)
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.end() for worker in workers))

    def assign_worker(self) -> EnvironmentWorker:
        """Return a worker with room for an episode; start one if there is none. Only admitted episodes call this."""
        free = [one for one in self._workers if one.accepts_episodes and one.episodes < self._episodes_per_worker]
        if not free:
            free = [EnvironmentWorker(self.name, self._options, self._memory_mb, self._reduce_company)]
            self._workers += free
        chosen = max(free, key=lambda worker: worker.episodes)  # fill workers up, so that fewer have to run
        chosen.episodes += 1
        return chosen

    def _reduce_company(self, worker: EnvironmentWorker) -> None:
        """Put fewer episodes into a worker after one has died with several."""
        if worker.episodes > 1:
            fewest = -(-self.max_episodes // _MOST_WORKERS)
            self._episodes_per_worker = max(1, fewest, min(self._episodes_per_worker, worker.episodes) // 2)

    async def finish_release(self, release: Coroutine[Any, Any, None]) -> None:
        """Run the release of a slot to its end, even if the caller is cancelled."""
        task = asyncio.create_task(release, name=f"{self.name} leaves")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        await asyncio.shield(task)

    async def free_slot(self, worker: EnvironmentWorker | None) -> None:
        """Admit another episode. A worker that accepts no more episodes ends with its last one."""
        try:
            if worker is not None:
                worker.episodes -= 1
                if not worker.accepts_episodes and not worker.episodes and worker in self._workers:
                    self._workers.remove(worker)
                    await worker.end()
        finally:
            self.admission.release()


class WorkerEpisodeSlot:
    """Plays one episode in a worker process."""

    def __init__(self, host: WorkerEnvironmentHost) -> None:
        self._host = host
        self._worker: EnvironmentWorker | None = None
        self._number = -1
        self._has_entered = False

    async def enter(self) -> None:
        await self._host.admission.acquire()
        self._has_entered = True

    async def open(self) -> EnvironmentTraits:
        self._worker = worker = self._host.assign_worker()
        self._number = next(worker.numbers)
        traits = await worker.call("open", self._number)
        return EnvironmentTraits(**{**traits, "stop": tuple(traits["stop"])})

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply:
        assert self._worker is not None
        return _read_reply(await self._worker.call("reset", self._number, seed, JsonValue(dict(data))))

    async def step(self, action: str) -> Reply:
        assert self._worker is not None
        return _read_reply(await self._worker.call("step", self._number, action))

    async def locate(self) -> str:
        """Return ` in function at file:line` for a call that takes long, or nothing."""
        return "" if self._worker is None else await self._worker.locate(self._number)

    async def leave(self) -> None:
        if self._has_entered:
            self._has_entered = False
            await self._host.finish_release(self._release(self._worker))

    async def _release(self, worker: EnvironmentWorker | None) -> None:
        try:
            if worker is not None and worker.is_alive:
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await worker.call("leave", self._number)
        except EnvironmentFailed:
            assert worker is not None
            worker.accepts_episodes = False  # a call hangs in it
        except TimeoutError:  # its event loop is blocked, so none of its episodes goes on
            assert worker is not None
            await worker.end(f"was ended, because it did not release an episode within {_RELEASE_TIMEOUT_S:g} s")
        finally:
            await self._host.free_slot(worker)


def _read_reply(fields: Mapping[str, Any]) -> Reply:
    """Return the reply that a worker sent as JSON, which knows no tuples."""
    return Reply(**{**fields, "tools": tuple(fields["tools"]), "tool_answers": tuple(fields["tool_answers"])})


class EnvironmentWorker:
    """One worker process, started by the first call."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        memory_mb: int = 0,
        on_death: Callable[[EnvironmentWorker], None] = lambda worker: None,
    ) -> None:
        self.accepts_episodes = True
        """Whether it may take further episodes."""
        self.episodes = 0
        self.numbers = count()
        self._spec = ChildSpec(
            name=f"{name}: its worker process",
            target=f"{__name__}:serve_episodes",
            args={"name": name, "options": JsonValue(dict(options))},
            threads=None,
            env={"PYTHONHASHSEED": "0"},  # equal seeds begin equally, also if an environment iterates over sets
            contained=True,
            output_limit=MAX_PRINTED_CHARACTERS,
            memory_mb=memory_mb,
        )
        self._name, self._on_death, self._end_reason = name, on_death, ""
        self._child: asyncio.Task[ChildProcess] | None = None
        self._locating = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether it was started and can answer."""
        child = self._child
        started = child is not None and child.done() and not child.cancelled() and child.exception() is None
        return started and child is not None and child.result().alive

    async def call(self, method: str, *args: Any) -> Any:
        """Return what the worker answers. Raises `EnvironmentFailed`."""
        if self._child is None:
            self._child = asyncio.create_task(self._start(), name=f"{self._name} worker starts")
        try:
            child = await asyncio.shield(self._child)
            return await child.call(method, *args)
        except PeerLost as error:
            self.accepts_episodes = False
            told = f"{self._spec.name} {self._end_reason}" if self._end_reason else summarise_end(str(error))
            raise EnvironmentFailed(told) from error
        except PeerFailed as error:
            raise EnvironmentFailed(f"{self._name}: {method} raised {error}"[:2000]) from error
        except HeadwayError as error:
            raise EnvironmentFailed(f"{self._name}: {error}") from error

    async def _start(self) -> ChildProcess:
        child = await ChildProcess.start(self._spec, _START_TIMEOUT_S, spawn=spawn_isolated(("-s", "-P")))
        child.subscribe(on_end=self._stop_accepting)
        return child

    async def locate(self, slot: int) -> str:
        """Return ` in function at file:line` for the call of a slot, also if it blocks the worker."""
        if not self.is_alive:
            return ""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return str(await self.call("locate", slot))
        except (TimeoutError, EnvironmentFailed):
            assert self._child is not None
            async with self._locating:
                return find_busy_line(await self._child.result().dump_stacks())

    def _stop_accepting(self, how: str) -> None:
        if self.accepts_episodes:
            self._on_death(self)
        self.accepts_episodes = False

    async def end(self, reason: str = "") -> None:
        """Kill the worker and everything below it. Episodes that it has fail with `reason`."""
        self.accepts_episodes, self._end_reason = False, self._end_reason or reason
        if self._child is None:
            return
        await asyncio.wait([self._child], timeout=_RELEASE_TIMEOUT_S)
        if not self._child.done():
            self._child.cancel()
            await asyncio.wait([self._child])
        elif self._child.exception() is None:
            await self._child.result().close(0.0)


class EpisodeServer:
    """Answers calls in a worker: plays episodes on slots that the caller has numbered."""

    def __init__(self, host: LocalEnvironmentHost) -> None:
        self._host = host
        self._directory = WorkingDirectory(host.name)
        self._slots: dict[int, LocalEpisodeSlot] = {}
        self._playing: dict[int, asyncio.Task[Any]] = {}

    async def open(self, slot: int) -> JsonValue:
        self._directory.restore()
        self._slots[slot] = self._host.make_slot()
        return await self._play(slot, self._slots[slot].open())

    async def reset(self, slot: int, seed: int, data: Mapping[str, Any]) -> JsonValue:
        return await self._play(slot, self._slots[slot].reset(seed, data))

    async def step(self, slot: int, action: str) -> JsonValue:
        return await self._play(slot, self._slots[slot].step(action))

    async def locate(self, slot: int) -> str:
        return await self._slots[slot].locate() if slot in self._slots else ""

    async def leave(self, slot: int) -> None:
        playing = self._playing.pop(slot, None)
        if playing is not None and not playing.done():
            playing.cancel()
            await asyncio.wait([playing])
        left = self._slots.pop(slot, None)
        if left is not None:
            await left.leave()

    async def close(self) -> None:
        """Do nothing: whoever asks ends the process."""

    async def _play(self, slot: int, call: Coroutine[Any, Any, Any]) -> JsonValue:
        self._playing[slot] = task = asyncio.ensure_future(call)
        return JsonValue(asdict(await task))


def serve_episodes(args: Mapping[str, Any]) -> EpisodeServer:
    """Make what a worker serves. Runs in the worker."""
    write_stacks_on_request()
    name, options, guard = args["name"], args["options"], WorkerGuard()
    return EpisodeServer(LocalEnvironmentHost(name, lambda: make_environment(name, **options), after_call=guard.check))
