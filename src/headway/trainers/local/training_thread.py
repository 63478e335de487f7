"""The thread that does the blocking work of a trainer, and the gate that decides when a job can no longer be stopped.

Guarantees: the event loop never blocks; jobs run one after the other. A job whose caller is cancelled, or whose thread
is abandoned, ends at its next `check`; after `commit` it runs to its end. Everybody who awaits an abandoned thread gets
an error at once, whatever the thread does.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch

from headway.errors import TrainerCrashed

T = TypeVar("T")
_SWITCH_S = 0.0005
"""How long another thread may keep the interpreter while this one has kernels to launch; Python's default is 5 ms."""


class JobAbandoned(Exception):
    """Raised inside a job that nobody waits for any more and that has changed nothing."""


class CommitGate:
    """Lets the caller of a job stop it, up to the moment when the job starts to change things."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = False
        self.committed = False

    def check(self) -> None:
        """Raise `JobAbandoned` if nobody waits for the job and it may still be stopped."""
        if self._abandoned and not self.committed:
            raise JobAbandoned

    def commit(self) -> None:
        """Declare that the job changes things from here on and must run to its end."""
        with self._lock:
            self.check()
            self.committed = True

    def abandon(self) -> None:
        """Ask the job to stop."""
        with self._lock:
            self._abandoned = True


class TrainingThread:
    """One thread with its own number of torch threads, and on a GPU its own stream."""

    def __init__(self, threads: int, name: str = "trainer", device: str = "cpu") -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_set_up, initargs=(threads, device))
        self._calls: dict[asyncio.Future[Any], CommitGate] = {}
        self._jobs: set[Future[Any]] = set()
        self._abandoned: str | None = None

    async def call(self, work: Callable[[CommitGate], T]) -> T:
        """Run `work` on the thread and return its result. Raise `TrainerCrashed` once the thread is abandoned."""
        if self._abandoned is not None:
            raise TrainerCrashed(self._abandoned)
        loop, gate = asyncio.get_running_loop(), CommitGate()
        outcome: asyncio.Future[T] = loop.create_future()
        self._calls[outcome] = gate
        job: Future[T] = self._pool.submit(work, gate)
        self._jobs.add(job)

        def on_done(done: Future[T]) -> None:
            self._jobs.discard(done)
            with suppress(RuntimeError):  # the loop was closed before the job ended
                loop.call_soon_threadsafe(_set_outcome, outcome, done)

        job.add_done_callback(on_done)
        try:
            return await outcome
        finally:
            gate.abandon()
            self._calls.pop(outcome, None)

    def abandon(self, reason: str) -> None:
        """Raise `reason` to everybody who waits or calls later. The thread ends when its job does. Idempotent."""
        if self._abandoned is None:
            self._abandoned = reason
        for outcome, gate in self._calls.items():
            gate.abandon()
            if not outcome.done():
                outcome.set_exception(TrainerCrashed(self._abandoned))
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def wait_for_end(self, timeout_s: float) -> bool:
        """Return whether the last job ends within `timeout_s`."""
        left = [asyncio.wrap_future(job) for job in list(self._jobs) if not job.cancelled()]
        if not left:
            return True
        _, late = await asyncio.wait(left, timeout=timeout_s)
        for one in left:
            if one.done() and not one.cancelled():
                one.exception()  # marks the exception as retrieved
        return not late


def _set_up(threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    if torch.device(device).type == "cuda":
        sys.setswitchinterval(_SWITCH_S)
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(device))  # models are made on the default stream
        torch.cuda.set_stream(stream)


def _set_outcome(outcome: asyncio.Future[T], done: Future[T]) -> None:
    if outcome.done():
        return
    if done.cancelled():
        outcome.set_exception(TrainerCrashed("the trainer was abandoned"))
    elif (error := done.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(done.result())
