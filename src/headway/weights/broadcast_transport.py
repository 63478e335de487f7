"""Versions by `torch.distributed` broadcast: every engine gets a bucket at once, on whatever machine it is.

    transport = BroadcastTransport(host="10.0.0.1")                    where the buckets can be read
    transport.admit(engine.receiver, "engine/0")
    inbox = BroadcastInbox("engine/0", "10.0.0.1", transport.port)     in the engine's process
    DoubleBufferedReceiver(activate, open_payload=inbox.open)          opens a `ReceivedBuffer`

An engine that was not present when a bucket was broadcast (a late joiner), or that asks again (the bucket arrived
damaged), gets it point to point: a broadcast among two.

Guarantees: every `send` ends within `timeout_s`, even if an engine does not answer (docs/architecture.md). Orders are
JSON, weights are bytes; nothing is pickled. There is no authentication: the port must be in a private network.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from headway.errors import TransferError
from headway.weights.base import Bucket, DevicePayload, ReceivedBuffer, WeightReceiver, payload_size
from headway.weights.shared_memory import PayloadReader

_IDLE = timedelta(days=365)
"""An inbox waits for orders as long as the sender lives."""
_VERSIONS = 2
"""Versions that an inbox holds: the one on its way, and the one before it."""
_GROUPS = 2
"""Groups kept at a time: that of all engines, and one of two."""
_MemberKey = tuple[str, int]
"""An engine's name, and the number of inboxes of that name until now."""


@runtime_checkable
class NamedReceiver(Protocol):
    """A receiver that knows the name of its inbox, and whether its engine can take weights now."""

    name: str

    @property
    def alive(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Member:
    """One inbox of an engine, as the sender knows it."""

    name: str
    incarnation: int
    orders: Iterator[int] = field(default_factory=count)

    @property
    def key(self) -> _MemberKey:
        return self.name, self.incarnation


class BroadcastTransport:
    """A `WeightTransport` to engines that have a `BroadcastInbox`. All its work is done by one thread."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 60.0) -> None:
        self._step = timedelta(seconds=timeout_s / 3)
        """Forming a group, sending, and waiting for answers may take a third of the limit each."""
        self._store = TCPStore(host, port, is_master=True, timeout=self._step, wait_for_workers=False)
        self.port: int = self._store.port
        self._receivers: WeakKeyDictionary[WeightReceiver, str] = WeakKeyDictionary()
        self._members: dict[str, _Member] = {}
        self._lost: set[_MemberKey] = set()
        self._groups: dict[tuple[_MemberKey, ...], tuple[int, Any]] = {}
        """Number and group by its members; the one made last at the end."""
        self._epochs = count()
        self._received: dict[tuple[int, int], set[_MemberKey]] = {}
        """Engines that have a bucket and have not asked for it yet, by version and bucket."""
        self._reader = PayloadReader()
        self._worker = ThreadPoolExecutor(1, "broadcast")
        self._closed = False

    def admit(self, receiver: WeightReceiver, name: str) -> None:
        """Register the receiver of the engine whose inbox is called `name`. Not needed for a `NamedReceiver`."""
        self._receivers[receiver] = name

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        name = self._receivers.get(receiver) or (receiver.name if isinstance(receiver, NamedReceiver) else None)
        if name is None:
            raise TransferError("a receiver that was not admitted to the broadcast")
        self._receivers[receiver] = name
        if self._closed:
            raise TransferError("the broadcast was closed")
        names = {name for other, name in self._receivers.items() if not isinstance(other, NamedReceiver) or other.alive}
        await asyncio.get_running_loop().run_in_executor(self._worker, self._carry, bucket, name, names)
        size = payload_size(bucket.payload)
        return replace(bucket, payload=ReceivedBuffer(version=bucket.version, index=bucket.index, size=size))

    def close(self) -> None:
        """Tell all inboxes to stop. Idempotent."""
        self._closed = True
        self._worker.shutdown(wait=True)
        self._reader.close()
        with suppress(RuntimeError):
            for member in self._members.values():
                self._send_order(member, {"do": "stop"})
        self._members, self._groups = {}, {}

    # What follows runs on the worker's thread.

    def _carry(self, bucket: Bucket, name: str, names: Set[str]) -> None:
        present = self._find_present(names)
        key = (bucket.version, bucket.index)
        if key not in self._received:
            self._forget_old_versions(bucket.version)
            self._received[key] = self._broadcast(bucket, tuple(present.values()))
        member = present.get(name)
        if member is None or member.key in self._lost:
            raise TransferError(f"{bucket.describe()}: {name} has no inbox, or it does not answer")
        if member.key in self._received[key]:
            self._received[key].discard(member.key)
        elif not self._broadcast(bucket, (member,)):
            raise TransferError(f"{bucket.describe()} did not arrive at {name}")

    def _find_present(self, names: Set[str]) -> dict[str, _Member]:
        """Return the inboxes of these engines that were not given up."""
        for name in names:
            number = int(self._store.add(f"life/{name}", 0))
            if number and (name not in self._members or self._members[name].incarnation != number):
                self._members[name] = _Member(name, number)
        members = ((name, member) for name, member in sorted(self._members.items()) if name in names)
        return {name: member for name, member in members if member.key not in self._lost}

    def _forget_old_versions(self, version: int) -> None:
        versions = list(dict.fromkeys(held for held, _ in self._received))
        if version not in versions and len(versions) >= _VERSIONS:
            self._received = {key: who for key, who in self._received.items() if key[0] != versions[0]}

    def _broadcast(self, bucket: Bucket, members: tuple[_Member, ...]) -> set[_MemberKey]:
        """Broadcast a bucket to `members` and return those that have it now."""
        formed = self._form_group(members) if members else None
        if formed is None:
            return set()
        (epoch, group), data = formed, self._open_payload(bucket.payload)
        order = {"do": "take", "epoch": epoch, "version": bucket.version, "index": bucket.index, "size": data.numel()}
        numbers = [self._send_order(member, order) for member in members]
        failure = _attempt(_broadcast_data, group, data, self._step)
        answers = self._collect_answers(members, numbers)
        arrived = {who for who, answer in answers.items() if answer == "ok"}
        if failure is not None or len(arrived) < len(members):
            self._groups.clear()
        return arrived

    def _form_group(self, members: tuple[_Member, ...]) -> tuple[int, Any] | None:
        """Return the number and the group of exactly these engines, or `None` if it cannot be formed."""
        who = tuple(member.key for member in members)
        if who in self._groups:
            return self._groups[who]
        epoch, size = next(self._epochs), len(who) + 1
        order = {"do": "form", "epoch": epoch, "size": size, "step_s": self._step.total_seconds()}
        numbers = [self._send_order(member, {**order, "rank": rank}) for rank, member in enumerate(members, start=1)]
        made: list[Any] = []
        failure = _attempt(lambda: made.append(_make_group(self._store, epoch, 0, size, self._step)))
        answers = self._collect_answers(members, numbers)
        if failure is not None or [*answers.values()] != ["ok"] * len(members):
            return None
        while len(self._groups) >= _GROUPS:
            del self._groups[next(iter(self._groups))]
        self._groups[who] = (epoch, made[0])
        return self._groups[who]

    def _open_payload(self, payload: Any) -> Tensor:
        """Return the bytes of a payload in the memory of the host."""
        if isinstance(payload, DevicePayload):
            data: Tensor = payload.data
            return data.cpu()
        view = self._reader.open(payload)
        return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)

    def _send_order(self, member: _Member, order: Mapping[str, Any]) -> int:
        number = next(member.orders)
        self._store.set(f"order/{member.name}/{member.incarnation}/{number}", json.dumps(order))
        return number

    def _collect_answers(self, members: Sequence[_Member], numbers: Sequence[int]) -> dict[_MemberKey, str]:
        """Return the answer of each member. One that does not answer in time is given up."""
        found, patience = {}, self._step
        for member, number in zip(members, numbers, strict=True):
            key = f"answer/{member.name}/{member.incarnation}/{number}"
            if _attempt(self._store.wait, [key], patience) is None:
                found[member.key] = self._store.get(key).decode()
                self._store.delete_key(key)
            else:
                self._lost.add(member.key)
                patience = timedelta(milliseconds=1)  # the others had as long
        return found


class BroadcastInbox:
    """Receives broadcast buckets in the engine's process. A thread waits for orders until `close`."""

    def __init__(self, name: str, host: str, port: int, *, timeout_s: float = 60.0) -> None:
        self._name = name
        self._address = (host, port, timedelta(seconds=timeout_s))
        self._store = self._connect()
        self._incarnation = int(self._store.add(f"life/{name}", 1))
        self._number = 0
        self._groups: dict[int, Any] = {}
        self._step = timedelta(seconds=timeout_s)
        self._received: dict[int, dict[int, Tensor]] = {}
        """Buckets by version; the version that came last at the end."""
        self._reader = PayloadReader()
        self._thread = threading.Thread(target=self._listen, name=f"broadcast inbox {name}", daemon=True)
        self._thread.start()

    def open(self, payload: Any) -> Any:
        """Return the bytes of a payload."""
        if not isinstance(payload, ReceivedBuffer):
            return self._reader.open(payload)
        data = self._received.get(payload.version, {}).get(payload.index)
        if data is None:
            raise TransferError(f"bucket {payload.index} of version {payload.version} is not here")
        host: Any = data.numpy()
        return memoryview(host)

    def close(self) -> None:
        """Stop the thread and free all buckets. Idempotent."""
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._connect().set(self._key("order", self._number), json.dumps({"do": "stop"}))
                self._thread.join()
        self._reader.close()
        self._received.clear()

    def _connect(self) -> Any:
        host, port, timeout = self._address
        try:
            return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise TransferError(f"nobody broadcasts at {host}:{port}: {error}") from error

    def _key(self, kind: str, number: int) -> str:
        return f"{kind}/{self._name}/{self._incarnation}/{number}"

    def _listen(self) -> None:
        while (order := self._wait_for_order()) is not None and order["do"] != "stop":
            answer = _attempt(self._execute, order) or "ok"
            number, self._number = self._number, self._number + 1
            if _attempt(self._store.set, self._key("answer", number), answer):
                return

    def _wait_for_order(self) -> dict[str, Any] | None:
        """Return the next order, or `None` when the sender is gone."""
        key, found = self._key("order", self._number), []

        def wait() -> None:
            self._store.wait([key], _IDLE)
            found.append(json.loads(self._store.get(key)))
            self._store.delete_key(key)

        return None if _attempt(wait) else dict(found[0])

    def _execute(self, order: Mapping[str, Any]) -> None:
        epoch = order["epoch"]
        if order["do"] == "form":
            while len(self._groups) >= _GROUPS:
                del self._groups[next(iter(self._groups))]
            self._step = timedelta(seconds=order["step_s"])
            self._groups[epoch] = _make_group(self._store, epoch, order["rank"], order["size"], self._step)
            return
        data = torch.empty(order["size"], dtype=torch.uint8)
        _broadcast_data(self._groups[epoch], data, self._step)
        version = self._received.setdefault(order["version"], {})
        version[order["index"]] = data
        while len(self._received) > _VERSIONS:
            del self._received[next(iter(self._received))]


def _attempt(call: Callable[..., object], *args: Any) -> str | None:
    """Call a function and return why it failed in the library, or `None`."""
    try:
        call(*args)
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return None


def _make_group(store: Any, epoch: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a process group of its own, with its own names in the store."""
    return dist.ProcessGroupGloo(PrefixStore(f"group/{epoch}", store), rank, size, timeout)


def _broadcast_data(group: Any, data: Tensor, timeout: timedelta) -> None:
    """Broadcast from rank 0 and wait until the data have arrived."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    if data.numel():
        group.broadcast([data], options).wait(timeout)
