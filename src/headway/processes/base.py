"""A peer is a part of the run in a process of its own.

It is asked by calls: a method's name with records as arguments. What it sends without being asked are notes. Notes and
answers arrive in the order in which they were sent.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.errors import BackendError, ConfigError, HeadwayError


class PeerLost(BackendError):
    """The peer ended, with everything it held. The message says how it ended and what it last wrote."""

    fatal = True


class PeerFailed(BackendError):
    """A call raised an error in the peer that is none of Headway's, or could not be sent. The peer still answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """Describes what to run in a process of its own."""

    name: str
    """Shown in errors, such as `engine/0`."""
    target: str
    """`module:function`. It is called in the child with `args` and returns the object to be served."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Values that can be encoded. A `JsonValue` arrives as plain JSON."""
    threads: int | None = 1
    """Threads of OpenMP, BLAS and torch. `None`: as the libraries decide."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    log: Path | None = None
    """The child's output is appended here. `None`: it is kept until the child ends, for the last lines of an error."""
    host: str = ""
    """`module:class` that answers calls for what `target` returns. Filled in by the class that calls the child."""
    contained: bool = False
    """Kill every process below the child when it ends, also one that has left the child's session. Linux only."""
    output_limit: int = 0
    """Bytes of output in ten seconds after which the child is killed. 0: no limit. With a limit, a log gets only so
    many bytes."""
    memory_mb: int = 0
    """Memory after which a contained child is killed, with everything below it. 0: no limit. Linux only."""

    def __post_init__(self) -> None:
        module, _, function = self.target.partition(":")
        if not (module and function):
            raise ConfigError("names no function", key=f"{self.name}.target", value=self.target, hint="module:function")
        if self.threads is not None and self.threads < 1:
            raise ConfigError("at least one", key=f"{self.name}.threads", value=self.threads)


class Peer(Protocol):
    """An object in another process."""

    host: str
    """The address of its machine, at which other peers of the run reach it."""

    @property
    def alive(self) -> bool:
        """Whether it can still answer."""

    def subscribe(
        self, *, on_note: Callable[[Any], None] | None = None, on_end: Callable[[str], None] | None = None
    ) -> None:
        """Call `on_note` with every note from now on, and `on_end` with how the peer ended, before waiting calls fail.

        A function that is given replaces the one before; one that is left out stays.
        """

    async def call(self, method: str, *args: Any) -> Any:
        """Return what the method returns there, or raise what it raises. Cancelling the call cancels it there too.

        Raises `PeerLost` if the peer ends before it has answered, and `PeerFailed` for errors that are not Headway's.
        """

    async def close(self, grace_s: float = 5.0) -> None:
        """Let the peer close what it holds, then end it; kill it after `grace_s`. Idempotent."""

    def kill(self) -> None:
        """End the peer now. Waiting calls fail. Idempotent."""


StartPeer = Callable[[ChildSpec], Awaitable[Peer]]
"""Starts a peer. Raises `PeerLost`, or what the target raised, if it does not come up."""


_CLOSE_S = 5.0
"""Time that peers have to close what they hold."""


class RestartablePeers(ABC):
    """Starts peers when they are first needed. After a loss, all are down until `restart` starts others.

    `crashed` is the error that a loss becomes. `on_down` is called at every loss, restart and close, before waiting
    calls fail.
    """

    def __init__(self, name: str, *, crashed: type[BackendError], on_down: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.incarnation = 0
        """Grows whenever the peers go down, which tells an answer of earlier peers from one of these."""
        self._crashed, self._on_down = crashed, on_down
        self._peers: list[Peer] = []
        self._starting = asyncio.Lock()
        self._down_reason = ""
        """Why the peers cannot be used until `restart`. Empty: they can."""

    @abstractmethod
    async def call(self, method: str, *args: Any, failure: type[BackendError]) -> Any:
        """Call a method of the peers. An error that is not Headway's becomes `failure`."""

    @abstractmethod
    async def _start_peers(self) -> None:
        """Fill `_peers` and make them ready."""

    @property
    def alive(self) -> bool:
        """Whether the peers are up and can answer."""
        return bool(self._peers) and all(peer.alive for peer in self._peers)

    @property
    def down_reason(self) -> str:
        """Why the peers cannot be used until `restart`; empty if they can."""
        return self._down_reason

    async def start(self) -> None:
        """Start the peers. Raises `ConfigError` if one refuses its arguments, else `crashed`."""
        try:
            await self._ensure_up()
        except self._crashed as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise

    async def restart(self) -> None:
        """Kill the peers and start others."""
        await self._end(f"{self.name} is restarted", kill=True)
        self._down_reason = ""
        await self._ensure_up()

    async def close(self) -> None:
        """End the peers. Idempotent."""
        await self._end(f"{self.name} is closed", kill=False)

    async def _ensure_up(self) -> list[Peer]:
        self._check_up()
        async with self._starting:
            self._check_up()
            if not self._peers:
                try:
                    await self._start_peers()
                except HeadwayError as error:
                    self._mark_down(f"{self.name} does not come up: {error}")
                    raise self._crashed(self._down_reason) from error
                except BaseException:  # some may be ready, and some not
                    for peer in self._forget_peers():
                        peer.kill()
                    raise
            return self._peers

    async def _end(self, reason: str, *, kill: bool) -> None:
        peers = self._forget_peers()
        if kill:
            for peer in peers:
                peer.kill()
        self._down_reason = ""
        self._mark_down(reason)
        await asyncio.gather(*(peer.close(0.0 if kill else _CLOSE_S) for peer in peers))

    def _forget_peers(self) -> list[Peer]:
        """Return the peers there were; how they end has no effect any more."""
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.subscribe(on_end=lambda how: None)
        return peers

    def _mark_down(self, reason: str) -> None:
        """Kill all peers. The first reason is the one that counts."""
        self._down_reason = self._down_reason or reason
        self.incarnation += 1
        self._on_down()
        for peer in self._peers:
            peer.kill()

    def _check_up(self) -> None:
        if self._down_reason:
            raise self._crashed(self._down_reason)


class RestartablePeer(RestartablePeers):
    """One peer that can be restarted. `greeting` is a method that it must have answered before it counts as up."""

    def __init__(
        self,
        spec: ChildSpec,
        start: StartPeer,
        *,
        crashed: type[BackendError],
        on_note: Callable[[Any], None],
        on_down: Callable[[], None] = lambda: None,
        greeting: str = "",
    ) -> None:
        super().__init__(spec.name, crashed=crashed, on_down=on_down)
        self._spec, self._start, self._on_note, self._greeting = spec, start, on_note, greeting

    async def call(self, method: str, *args: Any, failure: type[BackendError]) -> Any:
        (peer,) = await self._ensure_up()
        try:
            return await peer.call(method, *args)
        except PeerLost as error:
            raise self._crashed(str(error)) from error
        except PeerFailed as error:
            raise failure(f"{self.name}: {error}") from error

    async def _start_peers(self) -> None:
        peer = await self._start(self._spec)
        self._peers = [peer]
        peer.subscribe(on_note=self._on_note, on_end=self._mark_down)
        if self._greeting:
            await peer.call(self._greeting)
