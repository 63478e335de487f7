"""An engine in a process of its own, behind the same protocol: `RemoteEngine` in the parent, `EngineHost` in the child.

    engine = RemoteEngine(ChildSpec(name="engine/0", target="package.module:make_engine", args={…}), slots=8, start=…)

Guarantees: what the child has reported stays in `Progress`, in whole actions with their versions, whatever happens to
the child; nothing is recorded after `generate` has returned or raised. A child that ends is noticed at once: all calls
raise `EngineCrashed` until `restart`, which starts another. The child collects new actions over one turn of the event
loop and sends them in one note, before the answer that follows from them. Weights must lie where the child can open
them, because only references to buckets cross. The first call starts the child, if `start` has not.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from headway.engines.base import Engine, Progress, Request, SleepingEngine
from headway.errors import BackendError, EngineCrashed, EngineError, TransferError
from headway.processes.base import ChildSpec, RestartablePeer, StartPeer
from headway.types import ExpertRouting, FinishReason, VersionRun
from headway.weights.base import Bucket, Manifest, PayloadRef

HOST_TARGET = "headway.engines.remote_engine:EngineHost"
_Made = tuple[Sequence[Any], Sequence[float], tuple[VersionRun, ...], int]
"""Actions, log-probabilities and versions that a request has already, and how many tokens have their experts."""
_RoutingNote = tuple[int, ExpertRouting]
"""Number of a request and experts of its tokens."""


class _ReportedProgress(Progress):
    """Reports what is added to it."""

    __slots__ = ("_add", "_add_routing", "_number")

    def __init__(
        self,
        number: int,
        add: Callable[[int, Sequence[Any], Sequence[float], int], None],
        add_routing: Callable[[_RoutingNote], None],
    ) -> None:
        super().__init__()
        self._number = number
        self._add, self._add_routing = add, add_routing

    def extend(self, actions: Sequence[Any], logps: Sequence[float], version: int) -> None:
        super().extend(actions, logps, version)
        self._add(self._number, actions, logps, version)

    def add_routing(self, routing: ExpertRouting) -> None:
        super().add_routing(routing)
        self._add_routing((self._number, routing))


class EngineHost:
    """Answers the calls of the parent in the child, around the engine that the target has made."""

    def __init__(self, engine: Engine, send_note: Callable[[Any], None]) -> None:
        self._engine = engine
        self._send_note = send_note
        self._counts: list[int] = []
        """Request number, version and number of actions of each stretch, one after the other."""
        self._actions: list[Any] = []
        self._logps: list[float] = []
        self._routing: list[_RoutingNote] = []

    async def generate(self, number: int, request: Request, made: _Made) -> FinishReason:
        progress = _ReportedProgress(number, self._add, self._routing.append)
        progress.actions, progress.logps, progress.runs, progress.routing_start = made
        try:
            return await self._engine.generate(request, progress)
        finally:
            self._flush()

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)
        self._flush()

    async def pause(self) -> None:
        await self._engine.pause()
        self._flush()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self) -> bool:
        """Return whether the engine could free its memory."""
        if not isinstance(self._engine, SleepingEngine):
            return False
        await self._engine.sleep()
        return True

    async def begin(self, manifest: Manifest) -> None:
        await self._engine.receiver.begin(manifest)

    async def load(self, bucket: Bucket) -> None:
        await self._engine.receiver.load(bucket)

    async def flip(self) -> tuple[int, str]:
        """Return the version that is served now, and its checksum where the engine computes one."""
        receiver = self._engine.receiver
        await receiver.flip()
        self._flush()
        return receiver.version, getattr(receiver, "checksum", "")

    async def close(self) -> None:
        await self._engine.close()
        self._flush()

    def _add(self, number: int, actions: Sequence[Any], logps: Sequence[float], version: int) -> None:
        if not self._counts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._counts += (number, version, len(actions))
        self._actions += actions
        self._logps += logps

    def _flush(self) -> None:
        if self._counts or self._routing:
            self._send_note((self._counts, self._actions, self._logps, self._routing))
            self._counts, self._actions, self._logps = [], [], []
            self._routing.clear()


class RemoteEngine:
    """`spec.target` makes the engine in the child, which works on `slots` requests together."""

    def __init__(self, spec: ChildSpec, slots: int, start: StartPeer) -> None:
        self.name = spec.name
        self.slots = slots
        self.receiver = RemoteReceiver(self)
        self._child = RestartablePeer(
            replace(spec, host=HOST_TARGET),
            start,
            crashed=EngineCrashed,
            on_note=self._record_note,
            on_down=self._forget_version,
        )
        self._closed = False
        self._numbers = count()
        self._streams: dict[int, Progress] = {}

    async def start(self) -> None:
        """Start the child. Raises `ConfigError` when it refuses its arguments, else `EngineCrashed`."""
        await self._child.start()

    @property
    def alive(self) -> bool:
        """Whether there is a child that can answer."""
        return self._child.alive

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        number = next(self._numbers)
        self._streams[number] = progress
        so_far = progress.generation(FinishReason.ABORTED)
        made: _Made = (so_far.actions, so_far.logps, so_far.runs, progress.routed_tokens)
        try:
            finish: FinishReason = await self.call("generate", number, request, made)
            return finish
        finally:
            del self._streams[number]

    async def abort(self, request_id: str) -> None:
        if self._child.alive:
            await self.call("abort", request_id)

    async def pause(self) -> None:
        await self.call("pause")

    async def resume(self) -> None:
        if self._child.alive:
            await self.call("resume")

    async def sleep(self) -> None:
        if await self.call("sleep"):
            self._forget_version()

    async def restart(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        await self._child.restart()

    async def close(self) -> None:
        self._closed = True
        await self._child.close()

    async def call(self, method: str, *args: Any, failure: type[BackendError] = EngineError) -> Any:
        """Call the child. Errors that are not Headway's become `failure`."""
        incarnation = self._child.incarnation
        try:
            return await self._child.call(method, *args, failure=failure)
        except EngineCrashed:
            if incarnation == self._child.incarnation:  # the child lives, its engine does not
                self._forget_version()
            raise

    def _forget_version(self) -> None:
        self.receiver.version = -1

    def _record_note(self, note: tuple[Sequence[int], Sequence[Any], Sequence[float], Sequence[_RoutingNote]]) -> None:
        """Record stretches of actions: number, version and length of each, then actions, log-probabilities, experts."""
        counts, actions, logps, routing = note
        begin = 0
        for number, version, length in zip(counts[::3], counts[1::3], counts[2::3], strict=True):
            progress, end = self._streams.get(number), begin + length
            if progress is not None:
                try:
                    progress.extend(actions[begin:end], logps[begin:end], version)
                except Exception as error:  # a listener of one request must not cost the others their actions
                    message = f"{self.name}: a listener failed"
                    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
            begin = end
        for number, experts in routing:
            if number in self._streams:
                self._streams[number].add_routing(experts)


class RemoteReceiver:
    """A `WeightReceiver` that forwards to the child; `version` and `checksum` are of what the child serves."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.version = -1
        self.checksum = ""
        self.name = engine.name
        """Name of the engine, by which broadcasts of weights address it."""
        self._engine = engine

    @property
    def alive(self) -> bool:
        """Whether there is a child that can take weights."""
        return self._engine.alive

    async def begin(self, manifest: Manifest) -> None:
        await self._engine.call("begin", manifest, failure=TransferError)

    async def load(self, bucket: Bucket) -> None:
        if not isinstance(bucket.payload, PayloadRef):
            raise TransferError(f"bucket {bucket.index} of version {bucket.version} cannot be seen by its engine")
        await self._engine.call("load", bucket, failure=TransferError)

    async def flip(self) -> None:
        self.version, self.checksum = await self._engine.call("flip", failure=TransferError)
