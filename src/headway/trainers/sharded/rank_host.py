"""Where ranks meet: a store that rank 0 opens on its own machine, and the process group that is made in it.

    address = meeting.open(host)          rank 0: `host:port`
    meeting.join(address, host, device)   everybody, rank 0 too

`host` is the address of the machine that a rank is on, as the others reach it; loopback where all are on one.

Guarantees: the port is one that was free, and it is held from the moment it is found. Nobody listens on any other
address of the machine: gloo goes over the interface that has `host`, whatever the name of the machine stands for
(`GLOO_SOCKET_IFNAME` says otherwise). Whoever does not come, or dies later, is the controller's business, which ends
all of them.
"""

from __future__ import annotations

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
from headway.trainers.trainer_host import TrainerHost

_PATIENCE = timedelta(hours=2)
"""Of a collective: those who wait for a dead rank are killed, so that only a slow one is waited for."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class Rendezvous:
    """Of one rank, once in the life of its process."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._store: Store | None = None

    def open(self, host: str) -> str:
        """Rank 0: listen on a port that is free here. The address that all of them join at."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        port = int(listening.getsockname()[1])
        self._store = TCPStore(
            host,
            port,
            self._ranks,
            is_master=True,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return f"{host}:{port}"

    def join(self, address: str, host: str, device: str) -> None:
        """Returns when all are there."""
        name = find_network_interface(host)
        if name:
            os.environ.setdefault(_INTERFACE, name)
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
            logging.ERROR
        )  # gathers in two steps are meant
        cuda = torch.device(device).type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=self._store or _joined(address, self._ranks),
            rank=self._rank,
            world_size=self._ranks,
            timeout=_PATIENCE,
        )


def _joined(address: str, ranks: int) -> Store:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), ranks, is_master=False, timeout=_PATIENCE, wait_for_workers=False)


def find_network_interface(host: str) -> str:
    """The network interface with that IPv4 address; any address of loopback is on the one of loopback. Else empty."""
    with suppress(ValueError):
        wanted = ipaddress.ip_address(host)
        for name, found in _interfaces():
            if found == wanted or (found.is_loopback and wanted.is_loopback):
                return name
    return ""


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """Of this machine, those that have an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(found[20:24])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Before it has met the others."""

    number: int
    ranks: int
    device: str
    make: Callable[[], Trainer]
    """Its trainer. Called when all are there."""


class RankHost:
    """`open` of rank 0, `meet` of all, then whatever a trainer is asked."""

    def __init__(self, rank: RankSpec, tell: Callable[[Any], None]) -> None:
        self._rank, self._tell = rank, tell
        self._meeting = Rendezvous(rank.number, rank.ranks)
        self._host: TrainerHost | None = None

    async def open(self, host: str) -> str:
        """The address to meet at, on this machine, which is `host` for the others."""
        return self._meeting.open(host)

    async def meet(self, address: str, host: str) -> None:
        """Returns when all are there and this one has its trainer. On a thread: whoever waits can be told to end."""
        trainer = await asyncio.to_thread(self._met, address, host)
        self._host = TrainerHost(trainer, self._tell)

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()

    def __getattr__(self, method: str) -> Any:
        return getattr(self._host, method)

    def _met(self, address: str, host: str) -> Trainer:
        self._meeting.join(address, host, self._rank.device)
        return self._rank.make()
