"""A trainer of many ranks, each in a child process, behind the protocol of one trainer.

    trainer = MultiRankTrainer(ChildSpec(name="trainer", target="package.module:make_rank", …), start=…, ranks=4)

Each rank gets its number (`rank`) and the number of ranks (`ranks`). Every call that ranks compute together goes to all
of them at once, in one order, and rank 0 answers. Versions are gathered from `publishers`, each of which has a whole
copy on its own device; they must agree on every checksum. docs/sharding.md says how ranks meet.

Guarantees: ranks live and die together. When one ends, the others are killed at once, and everybody who waits here gets
`TrainerCrashed` with how it ended and in which call. The same happens if one does not come to a collective call within
`rank_s` (`rank_watch`), if one fails and the others do not within `grace_s`, or if a call succeeds on some ranks only.
A call that was sent is completed even if it is cancelled here, and `version` follows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from headway.errors import BackendError, TrainerCrashed, TransferError
from headway.monitor.wait_graph import WaitEdge
from headway.processes.base import ChildSpec, Peer, PeerFailed, PeerLost, RestartablePeers, StartPeer
from headway.processes.process_output import read_process_state
from headway.trainers.remote_trainer import RemoteTrainer
from headway.trainers.sharded.rank_watch import RankWatch
from headway.weights.base import Bucket, IpcCopies, Manifest

RANK_HOST = "headway.trainers.sharded.rank_host:RankHost"
_GATHER = "gather"
"""Method that only ranks with a store are asked for."""


class MultiRankTrainer(RemoteTrainer):
    """A `Trainer` of `ranks` child processes, made from `spec`.

    `customize` changes the spec of one rank, such as its environment. `join_s` is the time that the processes may take
    to join and to read the model, once they run. `rank_s` is how long the others wait for a rank that is late.
    `publishers` are the ranks that hold versions for engines.
    """

    def __init__(
        self,
        spec: ChildSpec,
        start: StartPeer,
        *,
        ranks: int,
        customize: Callable[[ChildSpec, int], ChildSpec] = lambda spec, rank: spec,
        join_s: float = 120.0,
        rank_s: float = 1800.0,
        grace_s: float = 10.0,
        publishers: Sequence[int] = (0,),
    ) -> None:
        self._ranks, self._customize, self._publishers = ranks, customize, tuple(publishers)
        self._limits = {"join_s": join_s, "rank_s": rank_s, "grace_s": grace_s}
        super().__init__(spec, start)

    def _make_child(self, spec: ChildSpec, start: StartPeer) -> RestartablePeers:
        specs = []
        for rank in range(self._ranks):
            args = {**spec.args, "rank": rank, "ranks": self._ranks, "publishes": rank in self._publishers}
            specs.append(self._customize(replace(spec, name=f"{spec.name}/{rank}", host=RANK_HOST, args=args), rank))
        note, publishers = self._take_note, self._publishers
        return RankProcesses(spec.name, specs, start, on_note=note, publishers=publishers, **self._limits)

    def waits(self) -> list[WaitEdge]:
        """Return edges of the wait-for graph: ranks that have not answered; if some do not run, only those.

        A rank that waits for another one in a collective has not answered either.
        """
        assert isinstance(self._child, RankProcesses)
        return self._child.describe_unanswered()


class RankProcesses(RestartablePeers):
    """One peer for each of `specs`, all up or all down."""

    def __init__(
        self,
        name: str,
        specs: Sequence[ChildSpec],
        start: StartPeer,
        *,
        on_note: Callable[[Any], None],
        join_s: float,
        rank_s: float,
        grace_s: float,
        publishers: Sequence[int] = (0,),
    ) -> None:
        super().__init__(name, crashed=TrainerCrashed)
        self._publishers = publishers
        self._specs, self._start, self._on_note = list(specs), start, on_note
        self._join_s, self._rank_s, self._grace_s = join_s, rank_s, grace_s
        self._unanswered: dict[asyncio.Future[Any], tuple[str, int, float]] = {}
        """Calls that ranks have not answered: method, rank, and since when."""
        self._pending: set[asyncio.Future[Any]] = set()
        """Calls that go on after their caller was cancelled."""
        self._address = ""
        """Where the ranks meet, once rank 0 has said it."""
        self._watching: asyncio.Future[str] | None = None
        """Watches the ranks while there is a call that one of them has not answered."""

    async def call(self, method: str, *args: Any, failure: type[BackendError]) -> Any:
        peers = await self._ensure_up()
        ranks = self._publishers if method == _GATHER else range(len(peers))
        calls = self._send_call(method, dict.fromkeys(ranks, args))
        if self._watching is None:
            watch = RankWatch(self.name, peers, self._rank_s, self._describe_call)
            self._watching = asyncio.ensure_future(watch.run_until_stuck())
            self._watching.add_done_callback(self._on_watch_end)
        collect = self._collect_copies if method == _GATHER else self._collect_answer
        answer = asyncio.ensure_future(collect(method, calls, failure))
        self._pending.add(answer)
        answer.add_done_callback(self._on_answer)
        return await asyncio.shield(answer)

    def _send_call(self, method: str, args: Mapping[int, Sequence[Any]]) -> list[asyncio.Future[Any]]:
        """Send a call to ranks, to each with its own arguments."""
        calls: list[asyncio.Future[Any]] = []
        for rank, own in args.items():
            call = asyncio.ensure_future(self._peers[rank].call(method, *own))
            self._unanswered[call] = method, rank, asyncio.get_running_loop().time()
            call.add_done_callback(self._forget_call)
            calls.append(call)
        return calls

    def _forget_call(self, call: asyncio.Future[Any]) -> None:
        self._unanswered.pop(call, None)
        if not call.cancelled():
            call.exception()  # marks the exception as retrieved
        if not self._unanswered and self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _on_watch_end(self, watching: asyncio.Future[str]) -> None:
        if watching is self._watching and not watching.cancelled():
            self._watching = None
            self._mark_down(f"{self.name}: no progress for {self._rank_s:g} s: {watching.result()}")

    def _describe_call(self, rank: int) -> str:
        """Return the calls that a rank has not answered."""
        return (
            ", ".join(dict.fromkeys(method for method, other, _ in self._unanswered.values() if other == rank))
            or "idle"
        )

    def _on_rank_end(self, rank: int, how: str) -> None:
        self._mark_down(f"in phase {self._describe_call(rank)}: {how}")

    def describe_unanswered(self) -> list[WaitEdge]:
        edges = []
        for method, rank, since_s in self._unanswered.values():
            process = getattr(self._peers[rank], "pid", None) if self._peers else None  # elsewhere it has none
            state = "" if process is None else read_process_state(process)
            what = f"{method} in process {process}{state}" if process else method
            edges.append((bool(state), WaitEdge(self.name, what, f"{self.name}/{rank}", since_s)))
        halted = [edge for is_halted, edge in edges if is_halted]
        return halted or [edge for _, edge in edges]

    async def _start_peers(self) -> None:
        self._peers = await _start_all([self._start(spec) for spec in self._specs])
        self._check_up()  # the trainer may have been closed meanwhile
        first = self._peers[0]
        first.subscribe(on_note=self._on_note)
        for rank, peer in enumerate(self._peers):
            peer.subscribe(on_end=partial(self._on_rank_end, rank))
        joining = asyncio.ensure_future(self._join_ranks())
        watch = RankWatch(self.name, self._peers, self._join_s, self._describe_call)
        watching = asyncio.ensure_future(watch.run_until_deadline())
        try:
            await asyncio.wait([joining, watching], return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                hosts = ", ".join(dict.fromkeys(peer.host for peer in self._peers))
                limit = f"were not ready after {self._join_s:g} s; they meet at {self._address or first.host}"
                raise PeerLost(f"ranks on {hosts} {limit}: {watching.result()}")
            await joining
        except PeerFailed as error:  # most often the library's, about a rank that is gone or late
            raise PeerLost(self._down_reason or f"{error}; {watch.describe()}") from error
        finally:
            for task in (joining, watching):
                task.cancel()

    async def _join_ranks(self) -> None:
        """Let the ranks meet and make their trainers."""
        first = self._peers[0]
        (opening,) = self._send_call("open", {0: [first.host]})
        self._address = await opening
        joining = {rank: [self._address, peer.host] for rank, peer in enumerate(self._peers)}
        await self._await_ranks(self._send_call("join", joining))
        await self._await_ranks(self._send_call("ready", dict.fromkeys(joining, ())))

    async def _await_ranks(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Wait for all ranks. If one fails because of another, how that one ended is known in a moment."""
        done, late = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if late and any(isinstance(call.exception(), PeerFailed) for call in done):
            await asyncio.wait(late, timeout=self._grace_s)
        for call in calls:
            if call.done() and (error := call.exception()) is not None:
                raise error

    async def _collect_answer(
        self, method: str, calls: Sequence[asyncio.Future[Any]], failure: type[BackendError]
    ) -> Any:
        """Return the answer of rank 0, or raise what all ranks raise; if they disagree, take all of them down."""
        _, late = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if late:
            _, late = await asyncio.wait(late, timeout=self._grace_s)
        if late:
            rank, failed = next((n, one) for n, one in enumerate(calls) if one.done() and one.exception() is not None)
            waiting = ", ".join(f"{self.name}/{n}" for n, call in enumerate(calls) if call in late)
            self._mark_down(f"{self.name}/{rank} failed in {method}, and {waiting} did not: {failed.exception()}")
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

    async def _collect_copies(
        self, method: str, calls: Sequence[asyncio.Future[Any]], failure: type[BackendError]
    ) -> tuple[Manifest, list[Bucket]]:
        """Return a version with the copies of all publishers. A rank that holds it no longer stays up."""
        await asyncio.wait(calls)
        for call in calls:
            error = call.exception()
            if isinstance(error, PeerLost):
                raise TrainerCrashed(self._down_reason or str(error)) from error
            if isinstance(error, PeerFailed):
                raise failure(f"{self.name}: {error}") from error
        return merge_copies([call.result() for call in calls])

    def _on_answer(self, answer: asyncio.Future[Any]) -> None:
        self._pending.discard(answer)
        if not answer.cancelled():
            answer.exception()  # marks the exception as retrieved


def merge_copies(gathered: Sequence[tuple[Manifest, list[Bucket]]]) -> tuple[Manifest, list[Bucket]]:
    """Join what ranks have published of one version. Raise `TransferError` unless all copies are equal."""
    manifest, buckets = gathered[0]
    if len(gathered) == 1:
        return manifest, buckets
    different = [number for number, (other, _) in enumerate(gathered) if other != manifest]
    if different:
        raise TransferError(f"version {manifest.version}: copy {different[0]} of the ranks differs from the first one")
    columns = zip(*(found for _, found in gathered), strict=True)
    return manifest, [
        replace(bucket, payload=IpcCopies(copies=tuple(copy.payload for copy in column)))
        for bucket, column in zip(buckets, columns, strict=True)
    ]


async def _start_all(starts: Sequence[Awaitable[Peer]]) -> list[Peer]:
    """Start all peers; if one fails, end those that came up and raise."""
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
