"""A version is a manifest plus buckets; an engine flips to it only when all of it has arrived and verified.

`gather` runs on the trainer and is serial; `send` crosses to one engine; `load` fills the engine's spare buffer;
`flip` switches between two actions. Nothing here exposes live trainer tensors, and nothing is pickled.

The bytes of a version are its tensors one after the other in the order of the manifest, without gaps, little-endian,
named by their torch dtypes (`bfloat16`), and cut into buckets at boundaries of elements.
"""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from headway.codec import register_records
from headway.errors import EngineCrashed, TransferError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a complete version consists of."""

    version: int
    tensors: tuple[TensorEntry, ...]
    checksums: tuple[str, ...]
    """One for each bucket, in order; their number is the number of buckets."""
    total_bytes: int

    def locate_bucket(self, index: int, size: int) -> slice:
        """Return which bytes bucket `index` of `size` bytes is: all are equal but the last. Raises `TransferError`."""
        last, total = len(self.checksums) - 1, self.total_bytes
        if not 0 <= index <= last:
            raise TransferError(f"bucket {index} of version {self.version}: there are {last + 1}")
        start = total - size if index == last else index * size
        if start < 0 or start + size > total:
            raise TransferError(f"bucket {index} of version {self.version}: {size} bytes do not fit into {total}")
        return slice(start, start + size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSlice:
    """The payload of a bucket that lies in shared memory: three words instead of the bytes."""

    segment: str
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSlice:
    """The payload of a bucket that lies in files which both sides can open."""

    spans: tuple[tuple[str, int, int], ...]
    """Path, first byte and number of bytes of each part, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSlice:
    """The payload of a bucket that lies in the object store of a cluster, where every node can read it."""

    ref: Any = field(repr=False)
    """Whoever holds it keeps the bytes. It crosses to another process beside the message."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedBuffer:
    """The payload of a bucket that was broadcast: its bytes lie in the process of the receiver already."""

    version: int
    index: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnchangedBucket:
    """The payload of a bucket that did not change since the version the receiver serves: it uses what it has."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcSlice:
    """The payload of a bucket that lies on a GPU and is opened by another process of the same machine."""

    lease: str
    """Segment that says whether the bytes are still there; whoever reads them holds it."""
    handle: tuple[Any, ...]
    """Numbers, text and bytes by which the whole buffer is opened."""
    start: int
    size: int


register_records(
    *(TensorEntry, Manifest, SharedSlice, FileSlice, ObjectSlice, IpcSlice, ReceivedBuffer, UnchangedBucket)
)
PayloadRef = SharedSlice | FileSlice | ObjectSlice | IpcSlice | ReceivedBuffer | UnchangedBucket
"""Payloads that cross to another process as they are: they say where the bytes are."""


@runtime_checkable
class DevicePayload(Protocol):
    """The payload of a bucket that lies on a device of this process, and never comes to the host."""

    @property
    def data(self) -> Any:
        """A flat tensor of bytes; whoever has it only reads it."""
        ...

    def checksum(self) -> str:
        """As in the manifest, counted where the bytes are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A slice of a version, in manifest order."""

    version: int
    index: int
    checksum: str
    payload: Any = field(repr=False)
    """A buffer, one of `PayloadRef`, a `DevicePayload`, or in the simulator the checksum of what arrived."""


register_records(Bucket)


def payload_size(payload: Any) -> int:
    """Bytes that a payload stands for, wherever they are."""
    if isinstance(payload, FileSlice):
        return sum(size for _, _, size in payload.spans)
    if isinstance(payload, SharedSlice | ObjectSlice | IpcSlice | ReceivedBuffer | UnchangedBucket):
        return payload.size
    if isinstance(payload, DevicePayload):
        return int(payload.data.numel())
    return memoryview(payload).nbytes


def compute_checksum(data: Any) -> str:
    """CRC-32 and length of a buffer, as text. Other threads run while it counts.

    It finds every torn, lost or overwritten stretch for the price of reading it once: 1.0 GiB/s on one core of a small
    server, where blake2b made 0.2. It is no defence against somebody who means harm; whoever can write into the buffer
    owns the process anyway.
    """
    view = memoryview(data).cast("B")
    return f"crc32:{zlib.crc32(view):08x}:{view.nbytes}"


class WeightSource(Protocol):
    """The trainer's side."""

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        """A consistent copy of `version`, bucket by bucket. Called by one task at a time.

        Raises `TransferError` when `version` is no longer held; the newest one always is.
        """
        ...


class WeightTransport(Protocol):
    """The way between: host copy, shared memory, object store, broadcast, disk."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        """Carry one bucket to where `receiver` can load it. Raises `TransferError` when it was lost."""
        ...

    def close(self) -> None:
        """Release everything that the transport holds. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """The engine's side: a spare buffer and an atomic flip."""

    @property
    def version(self) -> int:
        """What is served now; −1 before the first flip and after a restart."""
        ...

    async def begin(self, manifest: Manifest) -> None:
        """Prepare the spare buffer; an unfinished version is thrown away."""
        ...

    async def load(self, bucket: Bucket) -> None:
        """Verify and store one bucket. Raises `TransferError` on a checksum that does not match."""
        ...

    async def flip(self) -> None:
        """Serve the version begun, between two actions. Raises `TransferError` if a bucket is missing."""
        ...


class IncomingVersion(Protocol):
    """One version on its way in; used by one thread at a time."""

    @property
    def manifest(self) -> Manifest:
        """What is to arrive."""
        ...

    def load(self, bucket: Bucket) -> None:
        """Verify and take in a bucket of this version, in any order, also twice. Raises `TransferError`."""
        ...


S = TypeVar("S", bound=IncomingVersion)


class StagedReceiver(ABC, Generic[S]):
    """A `WeightReceiver` whose versions arrive in a stage: what those of all engines have in common.

    Buckets are loaded on a thread of their own, so that generation goes on meanwhile. `_serve` gets stages that every
    bucket of the manifest was loaded into, and `version` is what it last accepted.
    """

    def __init__(self, on_thread: Callable[[], object] = lambda: None) -> None:
        self.version = -1
        self.gone = False
        """The engine is down: whoever loads is told so."""
        self._on_thread = on_thread
        """Called first on the thread."""
        self._stage: S | None = None
        self._loaded: set[int] = set()
        self._loader: ThreadPoolExecutor | None = None

    @abstractmethod
    async def _staged(self, manifest: Manifest) -> S:
        """Room for a version. Raises `TransferError` for one that could never be served."""

    @abstractmethod
    async def _serve(self, stage: S) -> None:
        """Make a whole version live, between two actions."""

    async def _settle(self) -> None:
        """After a flip: let go of what is served no longer."""

    async def begin(self, manifest: Manifest) -> None:
        self._check_alive()
        self._stage = None
        stage = await self._staged(manifest)
        self._check_alive()
        self._stage, self._loaded = stage, set()

    async def load(self, bucket: Bucket) -> None:
        self._check_alive()
        stage, where = self._stage, f"bucket {bucket.index} of version {bucket.version}"
        if stage is None or stage.manifest.version != bucket.version:
            begun = "nothing" if stage is None else f"version {stage.manifest.version}"
            raise TransferError(f"{where}: {begun} was begun")
        if not 0 <= bucket.index < len(stage.manifest.checksums):
            raise TransferError(f"{where}: there are {len(stage.manifest.checksums)}")
        self._loaded.discard(bucket.index)  # a repetition that fails may leave other bytes than were verified
        await self._off_the_loop(lambda: stage.load(bucket))
        if self._stage is not stage:
            raise TransferError(f"{where}: thrown away, another version was begun meanwhile")
        self._loaded.add(bucket.index)

    async def flip(self) -> None:
        self._check_alive()
        stage = self._stage
        if stage is None:
            raise TransferError("no version was begun")
        wanted = len(stage.manifest.checksums)
        if len(self._loaded) < wanted:
            missing = f"lacks {wanted - len(self._loaded)} of {wanted} buckets"
            raise TransferError(f"version {stage.manifest.version} {missing}")
        await self._serve(stage)
        self.version = stage.manifest.version
        if self._stage is stage:
            self._stage = None
        del stage
        await self._settle()

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""
        self.version, self.gone = -1, gone
        self._stage, self._loaded = None, set()
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.shutdown(wait=False, cancel_futures=True)

    async def _off_the_loop(self, work: Callable[[], object]) -> None:
        """On the thread, one thing after the other."""
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, "weights", self._on_thread)
        await asyncio.get_running_loop().run_in_executor(self._loader, work)

    def _check_alive(self) -> None:
        if self.gone:
            raise EngineCrashed("the engine of this receiver is down")
