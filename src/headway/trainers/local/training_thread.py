"""One thread that does the blocking work of a trainer, and gates that decide when it is too late to stop.

Guarantees: the event loop never blocks; jobs run one after the other. A job whose caller is cancelled, or whose worker
is abandoned, ends at its next `check`; once it has passed `commit` it runs to its end. Whoever awaits an abandoned
worker is told at once, whatever the thread does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch

from headway.errors import TrainerCrashed

T = TypeVar("T")


class JobAbandoned(Exception):
    """Nobody waits for this job any more, and it has changed nothing."""


class CommitGate:
    """Between a job and those who may give it up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False
        self.committed = False

    def check(self) -> None:
        """Stop here if nobody waits."""
        if self._given_up and not self.committed:
            raise JobAbandoned

    def commit(self) -> None:
        """From here on the job changes things and must end."""
        with self._lock:
            self.check()
            self.committed = True

    def give_up(self) -> None:
        """Ask the job to stop."""
        with self._lock:
            self._given_up = True


class TrainingThread:
    """A thread with its own number of torch threads, and on a GPU a stream of its own, which others go before."""

    def __init__(self, threads: int, name: str = "trainer", device: str = "cpu") -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_settle_in, initargs=(threads, device))
        self._calls: dict[asyncio.Future[Any], CommitGate] = {}
        self._threads: set[Future[Any]] = set()
        self._gone: str | None = None

    async def call(self, work: Callable[[CommitGate], T]) -> T:
        """What `work` returns or raises. Raises `TrainerCrashed` once the worker is abandoned."""
        if self._gone is not None:
            raise TrainerCrashed(self._gone)
        loop, gate = asyncio.get_running_loop(), CommitGate()
        outcome: asyncio.Future[T] = loop.create_future()
        self._calls[outcome] = gate
        job: Future[T] = self._pool.submit(work, gate)
        self._threads.add(job)

        def ended(done: Future[T]) -> None:
            self._threads.discard(done)
            with suppress(RuntimeError):  # the loop has ended before the job
                loop.call_soon_threadsafe(_settle, outcome, done)

        job.add_done_callback(ended)
        try:
            return await outcome
        finally:
            gate.give_up()
            self._calls.pop(outcome, None)

    def abandon(self, reason: str) -> None:
        """Everybody who waits, or calls later, is told `reason`. The thread ends when its job does. Idempotent."""
        if self._gone is None:
            self._gone = reason
        for outcome, gate in self._calls.items():
            gate.give_up()
            if not outcome.done():
                outcome.set_exception(TrainerCrashed(self._gone))
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def ended(self, timeout_s: float) -> bool:
        """Whether the last job is over within `timeout_s`."""
        left = [asyncio.wrap_future(job) for job in list(self._threads) if not job.cancelled()]
        if not left:
            return True
        _, late = await asyncio.wait(left, timeout=timeout_s)
        for one in left:
            if one.done() and not one.cancelled():
                one.exception()  # seen
        return not late


def _settle_in(threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    if torch.device(device).type == "cuda":
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(device))  # models are made there
        torch.cuda.set_stream(stream)


def _settle(outcome: asyncio.Future[T], done: Future[T]) -> None:
    if outcome.done():
        return
    if done.cancelled():
        outcome.set_exception(TrainerCrashed("the trainer was given up"))
        return
    error = done.exception()
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(done.result())
