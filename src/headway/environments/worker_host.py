"""Runs environments in worker processes, which can be killed.

Guarantees: at most `workers` processes with `episodes_per_worker` episodes each. A worker that dies takes only its own
episodes with it; each of them fails with the exit status and the last output of the worker. A worker is killed and
replaced if a call hangs after its episode was abandoned, or if it prints without end. Processes that an environment
has started end with its worker. Workers end with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from itertools import count
from typing import IO, Any

from headway.environments.environment_output import MAX_PRINTED_CHARACTERS
from headway.environments.environment_worker import LENGTH_BYTES, SIGNAL_EXIT_BASE
from headway.environments.text_environment import EnvironmentTraits, Reply
from headway.errors import EnvironmentFailed

_RELEASE_TIMEOUT_S = 3.0
"""How long a worker may take to release an episode."""
_OUTPUT_TAIL_CHARACTERS = 2000


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
    ) -> None:
        self.name, self._options = name, dict(options)
        self._episodes_per_worker = episodes_per_worker
        self.max_episodes = min(max_episodes or workers * episodes_per_worker, workers * episodes_per_worker)
        """Largest number of episodes at once."""
        self._admission = asyncio.Semaphore(self.max_episodes)
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

    async def admit(self) -> None:
        """Wait until another episode may run."""
        await self._admission.acquire()

    def assign_worker(self) -> EnvironmentWorker:
        """Return a worker with room for an episode; start one if there is none. Only admitted episodes call this."""
        free = [one for one in self._workers if one.accepts_episodes and one.episodes < self._episodes_per_worker]
        if not free:
            free = [EnvironmentWorker(self.name, self._options)]
            self._workers += free
        chosen = max(free, key=lambda worker: worker.episodes)  # fill workers up, so that fewer have to run
        chosen.episodes += 1
        return chosen

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
            self._admission.release()


class WorkerEpisodeSlot:
    """Plays one episode in a worker process."""

    def __init__(self, host: WorkerEnvironmentHost) -> None:
        self._host = host
        self._worker: EnvironmentWorker | None = None
        self._number = -1
        self._has_entered = False

    async def enter(self) -> None:
        await self._host.admit()
        self._has_entered = True

    async def open(self) -> EnvironmentTraits:
        self._worker = worker = self._host.assign_worker()
        self._number = next(worker.numbers)
        traits = await worker.call("open", self._number)
        return EnvironmentTraits(**{**traits, "stop": tuple(traits["stop"])})

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply:
        assert self._worker is not None
        return Reply(**await self._worker.call("reset", self._number, seed, dict(data)))

    async def step(self, action: str) -> Reply:
        assert self._worker is not None
        return Reply(**await self._worker.call("step", self._number, action))

    async def leave(self) -> None:
        if self._has_entered:
            self._has_entered = False
            await self._host.finish_release(self._release(self._worker))

    async def _release(self, worker: EnvironmentWorker | None) -> None:
        try:
            if worker is not None and worker.is_alive:
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await worker.call("leave", self._number)
        except (TimeoutError, EnvironmentFailed):
            assert worker is not None
            worker.accepts_episodes = False  # a call hangs in it
        finally:
            await self._host.free_slot(worker)


class EnvironmentWorker:
    """One process, started by the first call."""

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self.accepts_episodes = self.is_alive = True
        self.episodes = 0
        self.numbers = count()
        self._kind, self._options = kind, dict(options)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = count()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._started: asyncio.Task[None] | None = None
        self._listening: list[asyncio.Task[None]] = []
        self._printed = 0
        self._tail = ""

    async def call(self, method: str, seat: int, *args: Any) -> Any:
        """What the worker answers. Raises `EnvironmentFailed`."""
        if self._started is None:
            self._started = asyncio.create_task(self._start(), name=f"{self._kind} worker starts")
        await asyncio.shield(self._started)
        return await self._ask(method, seat, *args)

    async def end(self) -> None:
        """Kill it and everything below it."""
        self.accepts_episodes = self.is_alive = False
        if self._started is not None:
            await asyncio.wait([self._started], timeout=_RELEASE_TIMEOUT_S)
        process = self._process
        if process is None:
            return
        self._hang_up()
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await asyncio.to_thread(process.wait)
        except TimeoutError:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109
        code = f"import sys; sys.path[:] = {path!r}; from headway.environments.environment_worker import main; main({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220  a few milliseconds
                [sys.executable, "-s", "-P", "-u", "-c", code],
                env={**os.environ, "PYTHONHASHSEED": "0"},  # equal seeds begin equally, also where sets are walked over
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        assert self._process.stdout is not None
        self._listening = [
            asyncio.create_task(self._listen(reader), name=f"{self._kind} worker"),
            asyncio.create_task(self._hear(self._process.stdout), name=f"{self._kind} worker's output"),
        ]
        await self._ask("start", -1, self._kind, self._options)

    async def _ask(self, method: str, seat: int, *args: Any) -> Any:
        if not self.is_alive or self._writer is None:
            raise EnvironmentFailed(f"{self._kind}: its worker process {self._ending()}")
        number, future = next(self._ids), asyncio.get_running_loop().create_future()
        data = json.dumps([number, method, seat, args]).encode()
        self._calls[number] = future
        try:
            self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
            return await future
        finally:
            self._calls.pop(number, None)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Answers to their callers, until the worker is gone."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                number, result, *problem = json.loads(await reader.readexactly(size))
                future = self._calls.get(number)
                if future is None or future.done():
                    continue
                if problem:
                    future.set_exception(EnvironmentFailed(f"{self._kind}: {problem[0]}"))
                else:
                    future.set_result(result)
        self.accepts_episodes = self.is_alive = False
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        self._fail()

    def _fail(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EnvironmentFailed(f"{self._kind}: its worker process {self._ending()}"))

    async def _hear(self, output: IO[bytes]) -> None:
        """What it prints is read, so that it is not held up, and dropped but for the end of it."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
        try:
            while data := await reader.read(1 << 16):
                self._printed += len(data)
                self._tail = (self._tail + data.decode("utf-8", "replace"))[-_OUTPUT_TAIL_CHARACTERS:]
                if self._printed > MAX_PRINTED_CHARACTERS and self.is_alive:
                    self.accepts_episodes = self.is_alive = False
                    self._hang_up()
        finally:
            transport.close()

    def _hang_up(self) -> None:
        """The guard on the other side then kills what is there, and ends."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _ending(self) -> str:
        if self._printed > MAX_PRINTED_CHARACTERS:
            return f"printed more than {MAX_PRINTED_CHARACTERS >> 20} MB"
        code = None if self._process is None else self._process.poll()
        how = "ended"
        if code is not None:
            killed = -code if code < 0 else code - SIGNAL_EXIT_BASE
            how = f"was killed by signal {killed}" if killed > 0 else f"ended with exit code {code}"
        said = "".join(f"\n  | {line}" for line in self._tail.strip().splitlines()[-6:])
        return f"{how}{said}"
