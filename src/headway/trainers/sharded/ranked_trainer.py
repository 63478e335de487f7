"""A trainer of many ranks, each in a process of its own, behind the protocol of one.

    trainer = RankedTrainer(ChildSpec(name="trainer", target="package.module:make_rank", …), Child.start, ranks=4)

Wherever `start` puts them: each is given its number (`rank`) and their number (`ranks`), rank 0 is asked for an address
on its machine, and all of them meet there. From then on every call that ranks compute together goes to all of them at
once, in one order; rank 0 answers.

Guarantees: ranks live and die together. When one ends, the others, who may wait for it in the middle of a step, are
killed at once, and whoever waits here is told `TrainerCrashed` with how it ended. The same where one fails and the
others do not within `grace_s`, or where some have done what others have not. A failure that all of them report alike is
the answer. A step that was sent is not called back: cancelled here, it is completed there, and `version` follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headway.errors import BackendError, TrainerCrashed
from headway.processes.base import ChildSpec, Peer, PeerFailed, PeerLost, RestartablePeers, StartPeer
from headway.trainers.remote_trainer import RemoteTrainer, RestartableChild

RANK_HOST = "headway.trainers.sharded.rank_host:RankHost"
_OF_RANK_0 = frozenset({"gather"})
"""What is asked of rank 0 alone: it concerns nothing but its store."""


class MultiRankTrainer(RemoteTrainer):
    """`spec` is that of every rank but for its number; `each` adds what else differs, such as the environment.

    `meet_s`: how long they may take to meet and to read the model, once their processes are there.
    """

    def __init__(
        self,
        spec: ChildSpec,
        start: StartPeer,
        *,
        ranks: int,
        each: Callable[[ChildSpec, int], ChildSpec] = lambda spec, rank: spec,
        meet_s: float = 120.0,
        close_s: float = 5.0,
        grace_s: float = 10.0,
    ) -> None:
        self._ranks, self._each, self._meet_s, self._grace_s = ranks, each, meet_s, grace_s
        super().__init__(spec, start, close_s=close_s)

    def _kept(self, spec: ChildSpec, start: StartPeer, close_s: float) -> RestartableChild:
        return RankProcesses(
            spec.name,
            [self._spec(spec, rank) for rank in range(self._ranks)],
            start,
            on_note=self._told,
            meet_s=self._meet_s,
            close_s=close_s,
            grace_s=self._grace_s,
        )

    def _spec(self, spec: ChildSpec, rank: int) -> ChildSpec:
        args = {**spec.args, "rank": rank, "ranks": self._ranks}
        return self._each(replace(spec, name=f"{spec.name}/{rank}", host=RANK_HOST, args=args), rank)


class RankProcesses(RestartablePeers):
    """One peer for each of `specs`, all up or all down."""

    def __init__(
        self,
        name: str,
        specs: Sequence[ChildSpec],
        start: StartPeer,
        *,
        on_note: Callable[[Any], None],
        meet_s: float,
        close_s: float,
        grace_s: float,
    ) -> None:
        super().__init__(name, crashed=TrainerCrashed, close_s=close_s)
        self._specs, self._start, self._on_note = list(specs), start, on_note
        self._meet_s, self._grace_s = meet_s, grace_s
        self._work: set[asyncio.Future[Any]] = set()
        """Calls that go on when their caller was cancelled."""

    async def call(self, method: str, *args: Any, failure: type[BackendError]) -> Any:
        """What rank 0 returns. Errors that are not ours become `failure`."""
        peers = await self._ensure_up()
        asked = peers[:1] if method in _OF_RANK_0 else peers
        calls = [asyncio.ensure_future(peer.call(method, *args)) for peer in asked]
        work = asyncio.ensure_future(self._answer(method, calls, failure))
        self._work.add(work)
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    async def _start_peers(self) -> None:
        self._peers = await _all_or_none([self._start(spec) for spec in self._specs])
        await self._meet()

    async def _meet(self) -> None:
        """All known to each other, each with its trainer."""
        self._check_up()  # closed, while they were started
        first = self._peers[0]
        first.subscribe(on_note=self._on_note)
        for peer in self._peers:
            peer.subscribe(on_end=self._mark_down)
        where = first.host
        try:
            async with asyncio.timeout(self._meet_s):
                where = await first.call("open", where)
                await asyncio.gather(*(peer.call("meet", where, peer.host) for peer in self._peers))
                await asyncio.gather(*(peer.call("ready") for peer in self._peers))
        except TimeoutError:
            hosts = ", ".join(dict.fromkeys(peer.host for peer in self._peers))
            raise PeerLost(f"ranks on {hosts} were not ready after {self._meet_s:g} s; they meet at {where}") from None

    async def _answer(self, method: str, calls: Sequence[asyncio.Future[Any]], failure: type[BackendError]) -> Any:
        _, late = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if late:
            _, late = await asyncio.wait(late, timeout=self._grace_s)
        if late:
            failed = next(call for call in calls if call.done() and call.exception() is not None)
            self._mark_down(f"{self.name}: in {method} one rank failed and others wait for it: {failed.exception()}")
            await asyncio.wait(calls)
        errors = [call.exception() for call in calls]
        if self._down_reason and any(isinstance(error, PeerLost) for error in errors):
            raise TrainerCrashed(self._down_reason)
        first = next((error for error in errors if error is not None), None)
        if first is None:
            return calls[0].result()
        if None in errors or isinstance(first, PeerLost | TrainerCrashed):
            self._mark_down(f"{self.name}: {method} failed in some ranks and not in others: {first}")
            raise TrainerCrashed(self._down_reason) from first
        if isinstance(first, PeerFailed):
            raise failure(f"{self.name}: {first}") from first
        raise first

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._work.discard(work)
        if not work.cancelled():
            work.exception()  # seen


async def _all_or_none(starts: Sequence[Awaitable[Peer]]) -> list[Peer]:
    """What all of them give; where one fails, nothing is left of the others."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                with suppress(Exception):
                    task.result().kill()
                    await task.result().close(0.0)
        raise
