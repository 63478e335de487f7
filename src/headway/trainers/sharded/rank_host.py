"""The child's side of one rank: it joins the other ranks, then serves the calls of a trainer.

    address = rendezvous.open(host)           rank 0: `host:port`
    rendezvous.join(address, host, device)    every rank, rank 0 too

`host` is the address of a rank's machine as the others reach it, or loopback if all ranks are on one machine. A rank's
trainer is made after all ranks have joined, because making it already needs collective calls.

Guarantees: the port was free and is held from the moment it is found. Nothing listens on any other address of the
machine: gloo uses the interface that has `host`, unless `GLOO_SOCKET_IFNAME` says otherwise. The controller ends all
ranks if one does not join, or dies later.
"""

import asyncio
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from headway.trainers.base import Trainer
from headway.trainers.remote_trainer import TrainerHost

_TIMEOUT = timedelta(hours=2)
"""Timeout of collectives. Ranks that wait for a dead one are killed, so only a slow rank is waited for."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class Rendezvous:
    """Connects one rank to the others, once in the life of its process."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._store: Store | None = None

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
        if cuda:
            torch.cuda.set_device(device)
        meeting_host, _, port = address.rpartition(":")
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=self._store or self._make_store(meeting_host, int(port), is_master=False),
            rank=self._rank,
            world_size=self._ranks,
            timeout=_TIMEOUT,
        )

    def _make_store(self, host: str, port: int, **options: Any) -> Store:
        return TCPStore(host, port, self._ranks, timeout=_TIMEOUT, wait_for_workers=False, **options)


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


class RankHost(TrainerHost):
    """Joins the other ranks with `open` (rank 0) and `join`, then serves the calls of a trainer."""

    def __init__(self, rank: RankSpec, tell: Callable[[Any], None]) -> None:
        super().__init__(None, tell)
        self._rank = rank
        self._rendezvous = Rendezvous(rank.number, rank.ranks)

    async def open(self, host: str) -> str:
        """Return the address to join at, on this machine, which the others reach as `host`."""
        return self._rendezvous.open(host)

    async def join(self, address: str, host: str) -> None:
        """Join the others and make the trainer, on a thread so that the rank can be told to end meanwhile."""

        def make_trainer() -> Trainer:
            self._rendezvous.join(address, host, self._rank.device)
            return self._rank.make()

        self.trainer = await asyncio.to_thread(make_trainer)
