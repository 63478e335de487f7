"""The child's side of one rank: it joins the other ranks, then serves the calls of a trainer.

    address = rendezvous.open(host)           rank 0: `host:port`
    rendezvous.join(address, host, device)    every rank, rank 0 too

`host` is the address of a rank's machine as the others reach it, or loopback if all ranks are on one machine. A rank's
trainer is made after all ranks have joined, because making it already needs collective calls.

`locate` answers where the rank is, also while it waits in a collective call: calls are answered by the event loop, and
ranks work on threads.

Guarantees: the port was free and is held from the moment it is found. Nothing listens on any other address of the
machine: gloo uses the interface that has `host`, unless `GLOO_SOCKET_IFNAME` says otherwise. The controller ends all
ranks if one does not join, dies later or does not come to a collective call (`rank_watch`).
"""

import asyncio
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from headway.trainers.base import Trainer
from headway.trainers.remote_trainer import TrainerHost

DistributedBackend = Literal["gloo", "nccl"]
_TRAINERS = str(Path(__file__).parents[1])
_LIBRARY = str(Path(dist.__file__).parent)
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class Rendezvous:
    """Connects one rank to the others, once in the life of its process.

    `timeout_s` is when the library gives up a call. `backend` moves the tensors; empty: nccl on GPUs, gloo on CPUs.
    """

    def __init__(
        self, rank: int, ranks: int, *, backend: DistributedBackend | Literal[""] = "", timeout_s: float = 3600.0
    ) -> None:
        self._rank, self._ranks, self._backend = rank, ranks, backend
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Store | None = None
        self.phase = "rendezvous"
        """What `join` does now: it connects to the store, then makes the process group."""

    def open(self, host: str) -> str:
        """Listen on a free port as rank 0, and return the address at which all ranks join."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family)
        port = int(server.getsockname()[1])
        self._store = self._make_store(host, port, is_master=True, master_listen_fd=server.detach())
        return f"{host}:{port}"

    def join(self, address: str, host: str, device: str) -> None:
        """Join the process group; return when all ranks have joined."""
        name = find_network_interface(host)
        if name:
            os.environ.setdefault(_INTERFACE, name)
        # Gathers in two steps are intended, and need no warning.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        cuda = torch.device(device).type == "cuda"
        backend = self._backend or ("nccl" if cuda else "gloo")
        if cuda:
            torch.cuda.set_device(torch.device(device).index or 0)
        meeting_host, _, port = address.rpartition(":")
        store = self._store or self._make_store(meeting_host, int(port), is_master=False)
        self.phase = f"{backend} process group"
        dist.init_process_group(
            backend,
            store=store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=self._timeout,
            device_id=torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None,
        )
        self.phase = "model"

    def _make_store(self, host: str, port: int, **options: Any) -> Store:
        return TCPStore(host, port, self._ranks, timeout=self._timeout, wait_for_workers=False, **options)


def find_network_interface(host: str) -> str:
    """Return the interface with the IPv4 address `host` (loopback for any loopback address), or an empty string."""
    with suppress(ValueError):
        wanted = ipaddress.ip_address(host)
        for name, found in _list_interfaces():
            if found == wanted or (found.is_loopback and wanted.is_loopback):
                return name
    return ""


def _list_interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """Yield the interfaces of this machine that have an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(found[20:24])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """A rank before it has joined the others."""

    number: int
    ranks: int
    device: str
    make: Callable[[], Trainer]
    """Makes the trainer, after all ranks have joined."""
    backend: DistributedBackend | Literal[""] = ""
    """Library that moves tensors between ranks; empty: nccl on GPUs, gloo on CPUs."""
    timeout_s: float = 3600.0
    """When the library gives up a collective call: after the controller, which can name the rank that is late."""


class RankHost(TrainerHost):
    """Joins the other ranks with `open` (rank 0) and `join`, then serves the calls of a trainer."""

    def __init__(self, rank: RankSpec, tell: Callable[[Any], None]) -> None:
        super().__init__(None, tell)
        self._rank = rank
        self._rendezvous = Rendezvous(rank.number, rank.ranks, backend=rank.backend, timeout_s=rank.timeout_s)

    async def open(self, host: str) -> str:
        """Return the address to join at, on this machine, which the others reach as `host`."""
        return self._rendezvous.open(host)

    async def join(self, address: str, host: str) -> None:
        """Join the others and make the trainer, on a thread so that the rank can be told to end meanwhile."""

        def make_trainer() -> Trainer:
            self._rendezvous.join(address, host, self._rank.device)
            return self._rank.make()

        self.trainer = await asyncio.to_thread(make_trainer)

    async def locate(self) -> tuple[str, dict[str, int]]:
        """Return where this rank is, and how many collective calls it has begun in each of its groups."""
        begun = count_collective_calls()
        return (describe_position() if self.trainer is not None else self._rendezvous.phase), begun


def count_collective_calls() -> dict[str, int]:
    """Return how many collective calls this process has begun, by the name of the process group."""
    if not dist.is_initialized():
        return {}
    groups: dict[Any, str] = dict(dist.distributed_c10d._world.pg_names)
    return {name: int(group._get_sequence_number_for_group()) for group, name in groups.items()}


def describe_position() -> str:
    """Return in which function of a trainer a thread of this process is, and in which call of the library there."""
    own = threading.get_ident()
    for ident, frame in sys._current_frames().items():
        found = _describe_stack(frame) if ident != own else ""
        if found:
            return found
    return ""


def _describe_stack(innermost: FrameType) -> str:
    frame: FrameType | None = innermost
    call = ""
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_LIBRARY) and function != "wrapper":
            call = call or f"{function} in "
        elif file.startswith(_TRAINERS) and not function.startswith("<"):
            return f"{call}{function}"
        frame = frame.f_back
    return ""
