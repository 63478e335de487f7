"""Pools of devices per role, the locks that roles on the same devices share, and parts of a run that live elsewhere.

A lock has an owner and a deadline: whoever cannot have it in time is told who holds it and since when.

A peer is a part of the run in a process of its own. What it is asked are calls by name with records for arguments;
what it tells unasked are notes. Notes and answers arrive in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from headway.errors import BackendError, ConfigError, HeadwayError, LockTimeout
from headway.monitor.wait_graph import WaitGraph

_TAIL_BYTES, _TAIL_LINES = 4000, 12


class ResourceLock:
    """Mutual exclusion, first come first served, with a name on it."""

    def __init__(self, name: str, *, waits: WaitGraph, clock: Callable[[], float]) -> None:
        self.name = name
        self.owner = ""
        """Who holds it now; empty: nobody."""
        self.on_busy: Callable[[], Awaitable[None]] | None = None
        """Awaited when it goes from free to held: whoever else uses the devices steps aside."""
        self.on_free: Callable[[], Awaitable[None]] | None = None
        self._since_s = 0.0
        self._line: deque[asyncio.Future[None]] = deque()
        self._waits, self._clock = waits, clock

    @asynccontextmanager
    async def hold(self, owner: str, timeout_s: float) -> AsyncIterator[None]:
        """Held for the length of the block. Raises `LockTimeout` when it is not to be had in `timeout_s`."""
        await self._acquire(owner, timeout_s)
        try:
            if self.on_busy is not None:
                await self.on_busy()
            yield
        finally:
            try:
                if self.on_free is not None and all(turn.done() for turn in self._line):
                    await self.on_free()
            finally:
                self._release()

    async def _acquire(self, owner: str, timeout_s: float) -> None:
        if self.owner:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            try:
                with self._waits.waiting(owner, f"lock on {self.name}", self.owner):
                    async with asyncio.timeout(timeout_s):
                        await turn
            except TimeoutError:
                self._decline(turn)
                held_s = self._clock() - self._since_s
                raise LockTimeout(
                    f"{owner} waited {timeout_s} s for {self.name}, held by {self.owner} for {held_s:.1f} s"
                ) from None
            except asyncio.CancelledError:
                self._decline(turn)
                raise
            finally:
                if turn in self._line:
                    self._line.remove(turn)
        self.owner = owner
        self._since_s = self._clock()

    def _decline(self, turn: asyncio.Future[None]) -> None:
        """The turn is no longer wanted; if it was given in this very tick, the next in line has it."""
        if turn.done() and not turn.cancelled():
            self._release()

    def _release(self) -> None:
        self.owner = ""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                self.owner = "(next in line)"
                turn.set_result(None)
                return


class DevicePools:
    """Devices by role; roles whose devices overlap share one lock."""

    def __init__(self, devices: Mapping[str, tuple[int, ...]], *, waits: WaitGraph, clock: Callable[[], float]) -> None:
        for role, pool in devices.items():
            if not pool:
                raise ConfigError("has no devices", key=f"{role}.device_mapping", value=list(pool))
        self.devices = dict(devices)
        self.locks: dict[str, ResourceLock] = {}
        for role in devices:
            shared = [self.locks[other] for other in self.locks if set(devices[other]) & set(devices[role])]
            lock = shared[0] if shared else ResourceLock(f"devices of {role}", waits=waits, clock=clock)
            self.locks[role] = lock
            self.locks = {other: lock if held in shared else held for other, held in self.locks.items()}

    def shared(self, left: str, right: str) -> bool:
        """Whether two roles take turns on the same devices."""
        return left in self.locks and self.locks[left] is self.locks.get(right)

    @asynccontextmanager
    async def hold(self, role: str, timeout_s: float) -> AsyncIterator[None]:
        """The role's devices for the length of the block; at once for a role that has none of its own."""
        lock = self.locks.get(role)
        if lock is None:
            yield
        else:
            async with lock.hold(role, timeout_s):
                yield


def open_output_file(log: Path | None) -> IO[bytes]:
    """Where a process of ours writes to: its log, or a file that goes with it."""
    if log is None:
        return tempfile.TemporaryFile()
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("a+b")


def read_last_lines(output: IO[bytes]) -> str:
    """Of what it has written, for people; nothing where that cannot be read."""
    with suppress(OSError, ValueError):
        descriptor = output.fileno()
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
        lines = data.decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:]
        return "".join(f"\n  | {line}" for line in lines)
    return ""


class PeerLost(BackendError):
    """The peer is gone with everything it held; the message says how it ended and what it last wrote."""

    fatal = True


class PeerFailed(BackendError):
    """A call raised something in the peer that is no error of ours, or could not be put; the peer still answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run in a process of its own."""

    name: str
    """Shown in errors, such as `engine/0`."""
    target: str
    """`module:function`. Called there with `args`; returns what is to be served."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """JSON values only."""
    threads: int = 1
    """Of OpenMP, BLAS and torch."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    log: Path | None = None
    """Its output is appended here. `None`: kept until it ends, for the last lines of an error."""
    host: str = ""
    """`module:class` that answers calls for what `target` returns. Filled by whoever speaks to it."""

    def __post_init__(self) -> None:
        module, _, function = self.target.partition(":")
        if not (module and function):
            raise ConfigError("names no function", key=f"{self.name}.target", value=self.target, hint="module:function")
        if self.threads < 1:
            raise ConfigError("at least one", key=f"{self.name}.threads", value=self.threads)


class Peer(Protocol):
    """Somebody in another process."""

    on_note: Callable[[Any], None]
    """Called with everything the peer tells unasked."""
    on_end: Callable[[str], None]
    """Called when the peer has ended, with how, before those who wait for it are told."""
    host: str
    """The address of its machine, as other peers of the run reach it."""

    @property
    def alive(self) -> bool:
        """Whether it can still answer."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """What the method returns or raises there. Cancelled here, it is cancelled there.

        Raises `PeerLost` when the peer ends before it has answered, `PeerFailed` for errors that are not ours.
        """
        ...

    async def close(self, grace_s: float = 5.0) -> None:
        """Let it close what it holds, then end it; by force after `grace_s`. Idempotent."""
        ...

    def kill(self) -> None:
        """End it now. Whoever waits for it is told. Idempotent."""
        ...


StartPeer = Callable[[ChildSpec], Awaitable[Peer]]
"""Raises `PeerLost` or what the target raised when it does not come up."""


class RestartablePeer:
    """One peer after the other for the same part: started when first needed; once lost, down until `restart`.

    `crashed` is what its loss is called. `on_down` is told of every loss, restart and close, before anybody who waits.
    `greeting` is a method that a new peer must have answered before it counts as up.
    """

    def __init__(
        self,
        spec: ChildSpec,
        start: StartPeer,
        *,
        crashed: type[BackendError],
        on_note: Callable[[Any], None],
        on_down: Callable[[], None] = lambda: None,
        greeting: str = "",
        close_s: float = 5.0,
    ) -> None:
        self.name = spec.name
        self.life = 0
        """Grows whenever it goes down: what was asked in an earlier life says nothing about this one."""
        self._spec, self._start, self._greeting, self._close_s = spec, start, greeting, close_s
        self._crashed, self._on_note, self._on_down = crashed, on_note, on_down
        self._peer: Peer | None = None
        self._starting = asyncio.Lock()
        self._down = ""
        """Why it cannot be used until `restart`; empty: it can."""

    @property
    def alive(self) -> bool:
        """Whether there is one, and it can answer."""
        return self._peer is not None and self._peer.alive

    async def start(self) -> None:
        """Have it ready. Raises `ConfigError` when it refuses what it was given, else `crashed`."""
        try:
            await self._up()
        except self._crashed as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise

    async def ask(self, method: str, *args: Any, otherwise: type[BackendError]) -> Any:
        """What the method returns there. Errors that are not ours become `otherwise`."""
        peer = await self._up()
        try:
            return await peer.call(method, *args)
        except PeerLost as error:
            raise self._crashed(str(error)) from error
        except PeerFailed as error:
            raise otherwise(f"{self.name}: {error}") from error

    async def restart(self) -> None:
        """Another one in its place."""
        await self._leave(f"{self.name} is restarted", kill=True)
        self._down = ""
        await self._up()

    async def close(self) -> None:
        """Let it go. Idempotent."""
        await self._leave(f"{self.name} is closed", kill=False)

    async def _up(self) -> Peer:
        self._check()
        async with self._starting:
            self._check()
            if self._peer is None:
                try:
                    peer = self._peer = await self._start(self._spec)
                    peer.on_note = self._on_note
                    peer.on_end = lambda how: self._lose(how) if peer is self._peer else None
                    if self._greeting:
                        await peer.call(self._greeting)
                except HeadwayError as error:
                    self._lose(f"{self.name} does not come up: {error}")
                    raise self._crashed(self._down) from error
            return self._peer

    async def _leave(self, reason: str, *, kill: bool) -> None:
        self._lose(reason)
        peer, self._peer = self._peer, None
        if peer is not None:
            if kill:
                peer.kill()
            await peer.close(0.0 if kill else self._close_s)

    def _lose(self, reason: str) -> None:
        self._down = reason
        self.life += 1
        self._on_down()

    def _check(self) -> None:
        if self._down:
            raise self._crashed(self._down)
