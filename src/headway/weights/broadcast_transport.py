"""Versions by `torch.distributed` broadcast: every engine gets a bucket at once, on whatever machine it is.

    transport = BroadcastTransport(host="10.0.0.1")                    where the buckets can be read
    transport.admit(engine.receiver, "engine/0")
    inbox = BroadcastInbox("engine/0", "10.0.0.1", transport.port)     in the engine's process
    DoubleBufferedReceiver(activate, open_payload=inbox.open)          opens a `ReceivedBuffer`

An engine that was not present when a bucket was broadcast (a late joiner), or that asks again (the bucket arrived
damaged), gets it point to point: a broadcast among two. With `backend="nccl"` bytes go from GPU to GPU, and both ends
name a `device` that no other member of the group has.

Guarantees: forming a group, a broadcast and the answers to it end within a third of `timeout_s` each, even if an engine
does not answer, and the error names the engine and the phase (docs/architecture.md). Orders are JSON, weights are
bytes; nothing is pickled. There is no authentication: the port must be in a private network.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from headway.errors import TransferError
from headway.weights.base import (
    Bucket,
    DevicePayload,
    ReceivedBuffer,
    WeightReceiver,
    compute_checksum,
    payload_size,
)
from headway.weights.shared_memory import PayloadReader

BroadcastBackend = Literal["gloo", "nccl"]
_IDLE = timedelta(days=365)
"""An inbox waits for orders as long as the sender lives."""
_VERSIONS = 2
"""Versions that an inbox holds: the one on its way, and the one before it."""
_GROUPS = 2
"""Groups kept at a time: that of all engines, and one of two."""
_FORMING, _SENDING = "the group is formed", "the bucket is broadcast"
"""Phases, as errors name them."""
_LEAST_MARGIN_S = 0.5
"""The library gives up by itself before this is over."""
_NCCL_POLL_S = 0.0005
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Keeps the library from ending the process when a rank is late: the deadlines here do what is needed."""
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

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 60.0,
        backend: BroadcastBackend = "gloo",
        device: str = "cpu",
    ) -> None:
        self._backend: BroadcastBackend = backend
        self._device = device
        self._step = timedelta(seconds=timeout_s / 3)
        """Forming a group, sending, and waiting for answers may take a third of the limit each."""
        self._store = TCPStore(host, port, is_master=True, timeout=self._step, wait_for_workers=False)
        self.port: int = self._store.port
        self._receivers: WeakKeyDictionary[WeightReceiver, str] = WeakKeyDictionary()
        self._members: dict[str, _Member] = {}
        self._failures: dict[_MemberKey, str] = {}
        """Why the last broadcast did not reach an engine."""
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
        member = present.get(name) or self._members.get(name)
        if member is None:
            raise TransferError(f"{bucket.describe()}: {name} has no inbox, or it does not answer")
        if member.key not in self._lost and member.key in self._received[key]:
            self._received[key].discard(member.key)
        elif member.key in self._lost or not self._broadcast(bucket, (member,)):
            why = self._failures.get(member.key, "it has no inbox, or it does not answer")
            raise TransferError(f"{bucket.describe()} did not arrive at {name}: {why}")

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
        order["step_s"] = self._step.total_seconds()
        numbers = [self._send_order(member, order) for member in members]
        failure = _attempt_within(self._step, _broadcast_data, group, data, self._step)
        answers = self._collect_answers(members, numbers, _SENDING, failure)
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
        order = {"do": "form", "epoch": epoch, "size": size, "backend": self._backend}
        order["step_s"] = self._step.total_seconds()
        numbers = [self._send_order(member, {**order, "rank": rank}) for rank, member in enumerate(members, start=1)]
        made: list[Any] = []

        def make() -> None:
            made.append(_make_group(self._backend, self._store, epoch, 0, size, self._step, self._device))

        failure = _attempt_within(self._step, make)
        answers = self._collect_answers(members, numbers, _FORMING, failure)
        if failure is not None or [*answers.values()] != ["ok"] * len(members):
            return None
        while len(self._groups) >= _GROUPS:
            del self._groups[next(iter(self._groups))]
        self._groups[who] = (epoch, made[0])
        return self._groups[who]

    def _open_payload(self, payload: Any) -> Tensor:
        """Return the bytes of a payload on the device that the group works on."""
        if isinstance(payload, DevicePayload):
            data: Tensor = payload.data
            return data.to(self._device)
        view = self._reader.open(payload)
        data = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)
        return data.to(self._device)

    def _send_order(self, member: _Member, order: Mapping[str, Any]) -> int:
        number = next(member.orders)
        self._store.set(f"order/{member.name}/{member.incarnation}/{number}", json.dumps(order))
        return number

    def _collect_answers(
        self, members: Sequence[_Member], numbers: Sequence[int], phase: str, failure: str | None
    ) -> dict[_MemberKey, str]:
        """Return the answer of each member. One that does not answer in time is given up.

        `failure` is what went wrong on this side in the same phase.
        """
        found, patience = {}, self._step
        for rank, (member, number) in enumerate(zip(members, numbers, strict=True), start=1):
            key, who = f"answer/{member.name}/{member.incarnation}/{number}", f"rank {rank} of {len(members) + 1}"
            if _attempt(self._store.wait, [key], patience) is None:
                found[member.key] = answer = self._store.get(key).decode()
                self._store.delete_key(key)
                problem = failure if answer == "ok" else answer
                self._failures[member.key] = f"{who} failed while {phase}: {problem}" if problem else ""
            else:
                self._lost.add(member.key)
                late_s = self._step.total_seconds()
                self._failures[member.key] = f"{who} did not answer within {late_s:g} s while {phase}"
                patience = timedelta(milliseconds=1)  # the others had as long
        return found


class BroadcastInbox:
    """Receives broadcast buckets in the engine's process. A thread waits for orders until `close`."""

    def __init__(self, name: str, host: str, port: int, *, timeout_s: float = 60.0, device: str = "cpu") -> None:
        self._name, self._device = name, device
        self._address = (host, port, timedelta(seconds=timeout_s))
        self._store = self._connect()
        self._incarnation = int(self._store.add(f"life/{name}", 1))
        self._number = 0
        self._groups: dict[int, Any] = {}
        self._received: dict[int, dict[int, Tensor]] = {}
        """Buckets by version; the version that came last at the end."""
        self._reader = PayloadReader()
        self._thread = threading.Thread(target=self._listen, name=f"broadcast inbox {name}", daemon=True)
        self._thread.start()

    def open(self, payload: Any) -> Any:
        """Return the bytes of a payload, or a `DevicePayload` if they are on a GPU."""
        if not isinstance(payload, ReceivedBuffer):
            return self._reader.open(payload)
        data = self._received.get(payload.version, {}).get(payload.index)
        if data is None:
            raise TransferError(f"bucket {payload.index} of version {payload.version} is not here")
        host: Any = None if data.is_cuda else data.numpy()
        return ReceivedDeviceSlice(data) if host is None else memoryview(host)

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
            answer = _attempt_within(timedelta(seconds=order["step_s"]), self._execute, order) or "ok"
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
        epoch, step = order["epoch"], timedelta(seconds=order["step_s"])
        if order["do"] == "form":
            while len(self._groups) >= _GROUPS:
                del self._groups[next(iter(self._groups))]
            self._groups[epoch] = _make_group(
                order["backend"], self._store, epoch, order["rank"], order["size"], step, self._device
            )
            return
        data = torch.empty(order["size"], dtype=torch.uint8, device=self._device)
        _broadcast_data(self._groups[epoch], data, step)
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


def _attempt_within(limit: timedelta, call: Callable[..., object], *args: Any) -> str | None:
    """Do the same on a thread of its own, which is left behind if it takes longer than `limit`."""
    failures: list[str | None] = []
    margin_s = max(limit.total_seconds() / 10, _LEAST_MARGIN_S)
    thread = threading.Thread(target=lambda: failures.append(_attempt(call, *args)), name="broadcast step", daemon=True)
    thread.start()
    thread.join(limit.total_seconds() + margin_s)
    return failures[0] if failures else f"not done within {limit.total_seconds():g} s"


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedDeviceSlice:
    """A `DevicePayload` that was broadcast to a GPU. Its checksum is that of the bytes in the sender's host memory."""

    data: Tensor

    def checksum(self) -> str:
        host: Any = self.data.cpu().numpy()
        return compute_checksum(host)


def _make_group(
    backend: BroadcastBackend, store: Any, epoch: int, rank: int, size: int, timeout: timedelta, device: str
) -> Any:
    """Make a process group of its own, with its own names in the store. All members have connected on return."""
    names = PrefixStore(f"group/{epoch}", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(names, rank, size, timeout)
    for name, value in _NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroupNCCL(names, rank, size, options)
    _broadcast_data(group, torch.zeros(1, dtype=torch.uint8, device=device), timeout)  # connects the members
    return group


def _broadcast_data(group: Any, data: Tensor, timeout: timedelta) -> None:
    """Broadcast from rank 0 and wait until the data have arrived."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    if not data.numel():
        return
    work, end_s = group.broadcast([data], options), time.monotonic() + timeout.total_seconds()
    if not data.is_cuda:
        work.wait(timeout)
        return
    while not work.is_completed():
        if time.monotonic() > end_s:
            group.abort()
            raise RuntimeError(f"not done within {timeout.total_seconds():g} s")
        time.sleep(_NCCL_POLL_S)
    torch.cuda.current_stream(data.device).synchronize()
