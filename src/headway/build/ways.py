"""Which way weights take from the trainer into the engines of a run: chosen once, from plain facts.

`way_of` is the choice. Whatever else depends on it (where versions are published, what engines are told, how much
memory that takes) follows from the `Route`, which travels to every part as JSON.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headway.config import Resolved
from headway.errors import ConfigError

Way = Literal["in_process", "shared_memory", "disk", "broadcast", "cuda_ipc", "object_store"]
_KEY = "weight_transfer.transport"
_HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way, and what both ends have to know of it."""

    way: Way = "in_process"
    delta: bool = False
    """Buckets that did not change are left out."""
    rendezvous: str = ""
    """`host:port` where a broadcast is to be found."""
    directory: str = ""
    """Where versions are written."""

    def to_json(self) -> dict[str, Any]:
        """For a child process; `Route(**…)` there."""
        return asdict(self)


def way_of(resolved: Resolved, *, device: str, processes: bool) -> Way:
    """What the configuration asks for, or what suits the placement. Raises `ConfigError`."""
    wanted = resolved.config.weight_transfer
    if not processes:
        if wanted.transport != "auto" or wanted.delta:
            key, value = (_KEY, wanted.transport) if wanted.transport != "auto" else ("weight_transfer.delta", True)
            problem = "trainer and engines are threads of one process here, and weights are handed over"
            raise ConfigError(problem, key=key, value=value, hint="processes: true")
        return "in_process"
    if wanted.transport == "cuda_ipc" and device != "cuda":
        raise ConfigError("needs a GPU", key=_KEY, value=wanted.transport, hint="shared_memory")
    if wanted.transport != "auto":
        return wanted.transport
    return "object_store" if resolved.config.cluster.kind == "ray" else "shared_memory"


def route_of(resolved: Resolved, *, device: str, processes: bool) -> Route:
    """The way with its particulars. Raises `ConfigError`."""
    way, wanted = way_of(resolved, device=device, processes=processes), resolved.config.weight_transfer
    return Route(
        way=way,
        delta=wanted.delta,
        rendezvous=_rendezvous(resolved) if way == "broadcast" else "",
        directory=_directory(resolved) if way == "disk" else "",
    )


def without_trainer(route: Route, *, clustered: bool) -> Route:
    """For engines that are given their weights once, by the process that asks them."""
    if route.way == "in_process":
        return route
    return Route(way="object_store" if clustered else "shared_memory")


def _directory(resolved: Resolved) -> str:
    given = resolved.config.weight_transfer.directory
    path = Path(given).expanduser() if given else Path(resolved.config.output_dir) / "weights"
    return str(path.absolute())


def _rendezvous(resolved: Resolved) -> str:
    given, key = resolved.config.weight_transfer.address, "weight_transfer.address"
    if given is None and resolved.config.cluster.kind == "ray":
        raise ConfigError("where do engines on other machines reach this one?", key=key, value=None, hint="10.0.0.1")
    host, colon, port = (given or _HERE).rpartition(":")
    if not colon:
        return f"{port}:{_free_port()}"
    if not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError("is no address", key=key, value=given, hint="host, or host:port")
    return f"{host}:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
