"""Versions by `torch.distributed` broadcast: every engine gets a bucket at once, on whatever machine it is.

    transport = BroadcastTransport(host="10.0.0.1")                    where the buckets can be read
    transport.admit(engine.receiver, "engine/0")
    landing = Landing("engine/0", "10.0.0.1", transport.port)          in the engine's process
    SpareReceiver(switch, read=landing.buffer)                         a `ReceivedBuffer` payload is opened there

The first engine that asks for a bucket has it broadcast to all that are there; the others find it landed. Whoever was
not there (a late joiner), or asks again (it arrived damaged), gets it point to point: a broadcast among two. Groups are
made over a store of their own, so that nothing meets the default group of a sharded trainer or a foreign engine.

Guarantees: every `send` ends within `timeout_s`. An engine that does not answer in time is out of the group, and a
`TransferError` for its own receiver alone; it comes back with its next `BroadcastInbox`. Orders are JSON, weights are bytes;
nothing is pickled. What lands is verified by the receiver's checksums.

Does not know who may connect: the store's port belongs into a network of one's own.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from headway.errors import TransferError
from headway.weights.base import Bucket, DevicePayload, ReceivedBuffer, WeightReceiver, payload_size
from headway.weights.device_memory import DeviceSlice
from headway.weights.shared_memory import PayloadReader

BroadcastBackend = Literal["gloo", "nccl"]
_IDLE = timedelta(days=365)
"""An engine waits for orders as long as whoever gives them lives."""
_VERSIONS = 2
"""Held where they landed: the one on its way, and the one before it."""


_GROUPS = 2
"""Kept at a time: of all, and of two."""
_Life = tuple[str, int]
"""An engine's name, and how many landings of that name there were."""


@dataclass(slots=True, eq=False)
class _Member:
    """One life of an engine, as the sender knows it."""

    name: str
    life: int
    orders: Iterator[int] = field(default_factory=count)

    @property
    def key(self) -> _Life:
        return self.name, self.life


class BroadcastTransport:
    """A `WeightTransport` to engines that have a `BroadcastInbox`. One thread does all of it, one thing at a time."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 60.0, backend: BroadcastBackend = "gloo"
    ) -> None:
        self._step = timedelta(seconds=timeout_s / 3)
        """Forming a group, sending, and waiting for answers have a third each."""
        self._backend: BroadcastBackend = backend
        self._store = TCPStore(host, port, is_master=True, timeout=self._step, wait_for_workers=False)
        self.port: int = self._store.port
        self._receivers: WeakKeyDictionary[WeightReceiver, str] = WeakKeyDictionary()
        self._members: dict[str, _Member] = {}
        self._lost: set[_Life] = set()
        self._groups: dict[tuple[_Life, ...], tuple[int, Any]] = {}
        """By who is in it: the number of the group, and the group; the one made last at the end."""
        self._epochs = count()
        self._landed: dict[tuple[int, int], set[_Life]] = {}
        """By version and bucket: the engines that have it and were not told so."""
        self._reader = PayloadReader()
        self._worker = ThreadPoolExecutor(1, "broadcast")
        self._closed = False

    def admit(self, receiver: WeightReceiver, name: str) -> None:
        """`receiver` is that of the engine whose landing is called `name`.

        Not needed where it has that `name` itself. One that says it is not `alive` is left out until it is again.
        """
        self._receivers[receiver] = name

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        name = self._receivers.get(receiver) or getattr(receiver, "name", None)
        if name is None:
            raise TransferError("a receiver that was not admitted to the broadcast")
        self._receivers[receiver] = name
        if self._closed:
            raise TransferError("the broadcast was closed")
        names = {name for one, name in self._receivers.items() if getattr(one, "alive", True)}
        await asyncio.get_running_loop().run_in_executor(self._worker, self._carry, bucket, name, names)
        size = payload_size(bucket.payload)
        return replace(bucket, payload=ReceivedBuffer(version=bucket.version, index=bucket.index, size=size))

    def close(self) -> None:
        """Send the landings home. Idempotent."""
        self._closed = True
        self._worker.shutdown(wait=True)
        self._reader.close()
        with suppress(RuntimeError):
            for member in self._members.values():
                self._order(member, {"do": "stop"})
        self._members, self._groups = {}, {}

    # -- on the worker's thread

    def _carry(self, bucket: Bucket, name: str, names: Set[str]) -> None:
        there = self._present(names)
        key = (bucket.version, bucket.index)
        if key not in self._landed:
            self._make_room(bucket.version)
            self._landed[key] = self._spread(bucket, tuple(there.values()))
        where, member = f"bucket {bucket.index} of version {bucket.version}", there.get(name)
        if member is None or member.key in self._lost:
            raise TransferError(f"{where}: {name} has no landing, or it does not answer")
        if member.key in self._landed[key]:
            self._landed[key].discard(member.key)
        elif not self._spread(bucket, (member,)):
            raise TransferError(f"{where} did not land at {name}")

    def _present(self, names: Set[str]) -> dict[str, _Member]:
        """Those of these engines that have a landing and were not given up."""
        for name in names:
            life = int(self._store.add(f"life/{name}", 0))
            if life and (name not in self._members or self._members[name].life != life):
                self._members[name] = _Member(name, life)
        there = ((name, one) for name, one in sorted(self._members.items()) if name in names)
        return {name: one for name, one in there if one.key not in self._lost}

    def _make_room(self, version: int) -> None:
        versions = list(dict.fromkeys(one for one, _ in self._landed))
        if version not in versions and len(versions) >= _VERSIONS:
            self._landed = {key: who for key, who in self._landed.items() if key[0] != versions[0]}

    def _spread(self, bucket: Bucket, members: tuple[_Member, ...]) -> set[_Life]:
        """Broadcast among `members`; those that have it now."""
        formed = self._formed(members) if members else None
        if formed is None:
            return set()
        (epoch, group), data = formed, self._bytes_of(bucket.payload)
        order = {"do": "take", "epoch": epoch, "version": bucket.version, "index": bucket.index, "size": data.numel()}
        numbers = [self._order(member, order) for member in members]
        failure = _attempt(_broadcast, group, data, self._step)
        answers = self._answers(members, numbers)
        arrived = {who for who, answer in answers.items() if answer == "ok"}
        if failure is not None or len(arrived) < len(members):
            self._groups.clear()
        return arrived

    def _formed(self, members: tuple[_Member, ...]) -> tuple[int, Any] | None:
        """The group of exactly these engines, or `None` where it does not come about."""
        who = tuple(member.key for member in members)
        if who in self._groups:
            return self._groups[who]
        epoch, size = next(self._epochs), len(who) + 1
        order = {"do": "form", "epoch": epoch, "size": size, "backend": self._backend}
        order["step_s"] = self._step.total_seconds()
        numbers = [self._order(member, {**order, "rank": rank}) for rank, member in enumerate(members, start=1)]
        made: list[Any] = []
        failure = _attempt(lambda: made.append(_group(self._backend, self._store, epoch, 0, size, self._step)))
        answers = self._answers(members, numbers)
        if failure is not None or [*answers.values()] != ["ok"] * len(members):
            return None
        while len(self._groups) >= _GROUPS:
            del self._groups[next(iter(self._groups))]
        self._groups[who] = (epoch, made[0])
        return self._groups[who]

    def _bytes_of(self, payload: Any) -> Tensor:
        """What is sent, where the backend wants it."""
        if isinstance(payload, DevicePayload):
            data: Tensor = payload.data
        else:
            view = self._reader.buffer(payload)
            data = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)
        return data.to("cuda" if self._backend == "nccl" else "cpu")

    def _order(self, member: _Member, order: Mapping[str, Any]) -> int:
        number = next(member.orders)
        self._store.set(f"order/{member.name}/{member.life}/{number}", json.dumps(order))
        return number

    def _answers(self, members: Sequence[_Member], numbers: Sequence[int]) -> dict[_Life, str]:
        """What each said; whoever says nothing in time is given up."""
        found, patience = {}, self._step
        for member, number in zip(members, numbers, strict=True):
            key = f"answer/{member.name}/{member.life}/{number}"
            if _attempt(self._store.wait, [key], patience) is None:
                found[member.key] = self._store.get(key).decode()
                self._store.delete_key(key)
            else:
                self._lost.add(member.key)
                patience = timedelta(milliseconds=1)  # the others had as long
        return found


class BroadcastInbox:
    """Where broadcast buckets arrive, in the engine's process. A thread waits for orders until `close`."""

    def __init__(self, name: str, host: str, port: int, *, timeout_s: float = 60.0, device: str = "cpu") -> None:
        self._name, self._device = name, device
        self._address = (host, port, timedelta(seconds=timeout_s))
        self._store = self._connected()
        self._life = int(self._store.add(f"life/{name}", 1))
        self._number = 0
        self._groups: dict[int, Any] = {}
        self._step = timedelta(seconds=timeout_s)
        self._landed: dict[int, dict[int, Tensor]] = {}
        """By version, the one that came last at the end."""
        self._reader = PayloadReader()
        self._thread = threading.Thread(target=self._listen, name=f"landing {name}", daemon=True)
        self._thread.start()

    def buffer(self, payload: Any) -> Any:
        """What `payload` stands for: bytes of the host, or a `DevicePayload` where they were counted on a device."""
        if not isinstance(payload, ReceivedBuffer):
            return self._reader.buffer(payload)
        data = self._landed.get(payload.version, {}).get(payload.index)
        if data is None:
            raise TransferError(f"bucket {payload.index} of version {payload.version} is not here")
        host: Any = None if data.is_cuda else data.numpy()
        return DeviceSlice(data) if host is None else memoryview(host)

    def close(self) -> None:
        """Leave. Idempotent."""
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._connected().set(self._key("order", self._number), json.dumps({"do": "stop"}))
                self._thread.join()
        self._reader.close()
        self._landed.clear()

    def _connected(self) -> Any:
        host, port, timeout = self._address
        try:
            return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise TransferError(f"nobody broadcasts at {host}:{port}: {error}") from error

    def _key(self, kind: str, number: int) -> str:
        return f"{kind}/{self._name}/{self._life}/{number}"

    def _listen(self) -> None:
        while (order := self._next()) is not None and order["do"] != "stop":
            answer = _attempt(self._obey, order) or "ok"
            number, self._number = self._number, self._number + 1
            if _attempt(self._store.set, self._key("answer", number), answer):
                return

    def _next(self) -> dict[str, Any] | None:
        """The next order; `None` when whoever gave them is gone."""
        key, found = self._key("order", self._number), []

        def wait() -> None:
            self._store.wait([key], _IDLE)
            found.append(json.loads(self._store.get(key)))
            self._store.delete_key(key)

        return None if _attempt(wait) else dict(found[0])

    def _obey(self, order: Mapping[str, Any]) -> None:
        epoch = order["epoch"]
        if order["do"] == "form":
            while len(self._groups) >= _GROUPS:
                del self._groups[next(iter(self._groups))]
            self._step = timedelta(seconds=order["step_s"])
            self._groups[epoch] = _group(order["backend"], self._store, epoch, order["rank"], order["size"], self._step)
            return
        data = torch.empty(order["size"], dtype=torch.uint8, device=self._device)
        _broadcast(self._groups[epoch], data, self._step)
        version = self._landed.setdefault(order["version"], {})
        version[order["index"]] = data
        while len(self._landed) > _VERSIONS:
            del self._landed[next(iter(self._landed))]


def _attempt(call: Callable[..., object], *args: Any) -> str | None:
    """Why `call` failed in the library, or `None`."""
    try:
        call(*args)
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return None


def _group(backend: BroadcastBackend, store: Any, epoch: int, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of its own, with its own names in the store."""
    names = PrefixStore(f"group/{epoch}", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(names, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(names, rank, size, options)


def _broadcast(group: Any, data: Tensor, timeout: timedelta) -> None:
    """From rank 0, until it is there."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    if data.numel():
        group.broadcast([data], options).wait(timeout)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()
