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

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

_PATIENCE = timedelta(hours=2)
"""Of a collective: those who wait for a dead rank are killed, so that only a slow one is waited for."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class Meeting:
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
        name = interface_of(host)
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


def interface_of(host: str) -> str:
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
