"""Moves a version of the weights from the trainer into the engines.

A version is a manifest plus buckets. `gather` runs on the trainer, one at a time; `send` carries a bucket to one
engine; `load` fills the engine's spare buffer; `flip` switches to it between two actions, and only when all of the
version has arrived and was verified. Nothing here exposes live tensors of the trainer, and nothing is pickled.

The bytes of a version are its tensors one after the other in the order of the manifest, without gaps, little-endian,
named by their torch dtypes (`bfloat16`), and cut into buckets at boundaries of elements.
"""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from headway.codec import register_records
from headway.errors import EngineCrashed, TransferError

OpenPayload = Callable[[Any], Any]
"""Returns the bytes of a payload, or a `DevicePayload`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describes a complete version."""

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

    def verify(self, bucket: Bucket, found: str) -> None:
        """Raise `TransferError` unless `found` is the checksum of this bucket."""
        expected = self.checksums[bucket.index]
        if found != expected:
            raise TransferError(f"{bucket.describe()}: checksum {found} instead of {expected}")

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        tensors = [[entry.name, list(entry.shape), entry.dtype] for entry in self.tensors]
        return {**asdict(self), "tensors": tensors, "checksums": list(self.checksums)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        """Return the manifest that `to_json` was called on. Raises `TransferError` for any other data."""
        try:
            return Manifest(
                version=int(data["version"]),
                tensors=tuple(
                    TensorEntry(name=str(name), shape=tuple(int(n) for n in shape), dtype=str(dtype))
                    for name, shape, dtype in data["tensors"]
                ),
                checksums=tuple(map(str, data["checksums"])),
                total_bytes=int(data["total_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"not a manifest: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSlice:
    """The payload of a bucket in shared memory: where to read it."""

    segment: str
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSlice:
    """The payload of a bucket in files that both sides can open."""

    spans: tuple[tuple[str, int, int], ...]
    """Path, first byte and number of bytes of each part, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSlice:
    """The payload of a bucket in the object store of a cluster, where every node can read it."""

    ref: Any = field(repr=False)
    """Keeps the bytes as long as it is held. It crosses to another process beside the message."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedBuffer:
    """The payload of a bucket that was broadcast: its bytes are in the process of the receiver already."""

    version: int
    index: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnchangedBucket:
    """The payload of a bucket that did not change since the version that the receiver serves, which has the bytes."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcSlice:
    """The payload of a bucket on a GPU, which another process of the same machine opens."""

    lease: str
    """Segment that says whether the bytes are still there. A reader locks it."""
    handle: tuple[Any, ...]
    """Numbers, text and bytes by which the whole buffer is opened."""
    start: int
    size: int
    rank: int = 0
    """Trainer rank that has the bytes on its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcCopies:
    """The payload of a bucket of which several trainer ranks hold a copy, each on its own device."""

    copies: tuple[IpcSlice, ...]

    def choose(self, rank: int) -> IpcSlice:
        """Return the copy of `rank`, or the first one if that rank has none."""
        return next((copy for copy in self.copies if copy.rank == rank), self.copies[0])


PayloadRef = SharedSlice | FileSlice | ObjectSlice | IpcSlice | IpcCopies | ReceivedBuffer | UnchangedBucket
"""Payloads that cross to another process as they are, because they only say where the bytes are."""


@runtime_checkable
class DevicePayload(Protocol):
    """The payload of a bucket on a device of this process, which never comes to the host."""

    @property
    def data(self) -> Any:
        """Flat tensor of bytes, to be read only."""

    def checksum(self) -> str:
        """Compute the checksum of the manifest on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A part of a version, in manifest order."""

    version: int
    index: int
    checksum: str
    payload: Any = field(repr=False)
    """A buffer, a `PayloadRef`, a `DevicePayload`, or in the simulator the checksum of what arrived."""

    def describe(self) -> str:
        """Name the bucket in an error message."""
        return f"bucket {self.index} of version {self.version}"


register_records(
    *(TensorEntry, Manifest, Bucket, SharedSlice, FileSlice, ObjectSlice, IpcSlice, IpcCopies),
    *(ReceivedBuffer, UnchangedBucket),
)


def payload_size(payload: Any) -> int:
    """Return the number of bytes of a payload, wherever they are."""
    if isinstance(payload, FileSlice):
        return sum(size for _, _, size in payload.spans)
    if isinstance(payload, IpcCopies):
        return payload.copies[0].size
    if isinstance(payload, SharedSlice | ObjectSlice | IpcSlice | ReceivedBuffer | UnchangedBucket):
        return payload.size
    if isinstance(payload, DevicePayload):
        return int(payload.data.numel())
    return memoryview(payload).nbytes


def compute_checksum(data: Any) -> str:
    """Return CRC-32 and length of a buffer as text. Other threads run meanwhile.

    It finds every torn, lost or overwritten part for the price of reading the buffer once: 1.0 GiB/s on one core of a
    small server, where blake2b made 0.2. It does not protect against attackers: a process that can write into the
    buffer controls this one anyway.
    """
    view = memoryview(data).cast("B")
    return f"crc32:{zlib.crc32(view):08x}:{view.nbytes}"


class WeightSource(Protocol):
    """The trainer's side of a transfer."""

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        """Return a consistent copy of `version`, bucket by bucket. Called by one task at a time.

        Raises `TransferError` if `version` is no longer held; the newest one always is.
        """


class PublishingStore(WeightSource, Protocol):
    """A weight source that versions are published into."""

    @property
    def wire_dtype(self) -> Any:
        """Type in which floating tensors are sent; `None`: as they are."""

    def publish(self, version: int, tensors: Mapping[str, Any], read: Callable[[str], Any] | None = None) -> None:
        """Hold a copy of `tensors` as `version`; with `read`, of what it returns for each of their names in order."""

    def clear(self) -> None:
        """Drop all versions: the trainer is gone, or about to load other weights."""

    def close(self) -> None:
        """Free the memory. Idempotent."""


class WeightTransport(Protocol):
    """Carries buckets: by host copy, shared memory, object store, broadcast or disk."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        """Carry one bucket to where `receiver` can load it. Raises `TransferError` if it was lost."""

    def close(self) -> None:
        """Release everything that the transport holds. Idempotent."""


class WeightReceiver(Protocol):
    """The engine's side of a transfer: a spare buffer and an atomic flip."""

    @property
    def version(self) -> int:
        """Version that is served now; −1 before the first flip and after a restart."""

    async def begin(self, manifest: Manifest) -> None:
        """Prepare the spare buffer; an unfinished version is thrown away."""

    async def load(self, bucket: Bucket) -> None:
        """Verify and store one bucket. Raises `TransferError` on a checksum that does not match."""

    async def flip(self) -> None:
        """Serve the version begun, between two actions. Raises `TransferError` if a bucket is missing."""


class IncomingVersion(Protocol):
    """One version that is being received; used by one thread at a time."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the version."""

    def load(self, bucket: Bucket) -> None:
        """Verify and store a bucket of this version, in any order, also twice. Raises `TransferError`."""


S = TypeVar("S", bound=IncomingVersion)


class StagedReceiver(ABC, Generic[S]):
    """A `WeightReceiver` that collects a version in a stage, the common base of those of all engines.

    Buckets are loaded on a thread of their own, so that generation goes on meanwhile. `_serve` only gets stages into
    which every bucket of the manifest was loaded, and `version` is what it last accepted.
    """

    def __init__(
        self,
        on_thread: Callable[[], object] = lambda: None,
        release_payloads: Callable[[], object] | None = None,
    ) -> None:
        self.version = -1
        self.checksum = ""
        """Checksum of the tensors that are served, where the receiver computes one."""
        self.gone = False
        """Whether the engine is down: then every method raises `EngineCrashed`."""
        self._on_thread = on_thread
        """Called first on the thread."""
        self._release_payloads = release_payloads
        """Called on the thread when a version is served and its payloads are read no longer."""
        self._stage: S | None = None
        self._loaded: set[int] = set()
        self._loader: ThreadPoolExecutor | None = None

    @abstractmethod
    async def _make_stage(self, manifest: Manifest) -> S:
        """Make room for a version. Raises `TransferError` for one that could never be served."""

    @abstractmethod
    async def _serve(self, stage: S) -> None:
        """Make a whole version live, between two actions."""

    async def _release_previous(self) -> None:
        """Release what is served no longer. Called after a flip."""

    async def begin(self, manifest: Manifest) -> None:
        self._check_alive()
        self._stage = None
        stage = await self._make_stage(manifest)
        self._check_alive()
        self._stage, self._loaded = stage, set()

    async def load(self, bucket: Bucket) -> None:
        self._check_alive()
        stage = self._stage
        if stage is None or stage.manifest.version != bucket.version:
            begun = "nothing" if stage is None else f"version {stage.manifest.version}"
            raise TransferError(f"{bucket.describe()}: {begun} was begun")
        if not 0 <= bucket.index < len(stage.manifest.checksums):
            raise TransferError(f"{bucket.describe()}: there are {len(stage.manifest.checksums)}")
        self._loaded.discard(bucket.index)  # a repetition that fails may leave other bytes than were verified
        await self._run_on_thread(lambda: stage.load(bucket))
        if self._stage is not stage:
            raise TransferError(f"{bucket.describe()}: thrown away, another version was begun meanwhile")
        self._loaded.add(bucket.index)

    async def flip(self) -> None:
        self._check_alive()
        stage = self._stage
        if stage is None:
            raise TransferError("no version was begun")
        total, loaded = len(stage.manifest.checksums), len(self._loaded)
        if loaded < total:
            raise TransferError(f"version {stage.manifest.version} lacks {total - loaded} of {total} buckets")
        await self._serve(stage)
        self.version = stage.manifest.version
        if self._stage is stage:
            self._stage = None
        del stage
        await self._release_previous()
        if self._release_payloads is not None:
            await self._run_on_thread(self._release_payloads)

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""
        self.version, self.gone = -1, gone
        self._stage, self._loaded = None, set()
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.shutdown(wait=False, cancel_futures=True)

    async def _run_on_thread(self, work: Callable[[], object]) -> None:
        """Run `work` on the receiver's thread, one call after the other."""
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, "weights", self._on_thread)
        await asyncio.get_running_loop().run_in_executor(self._loader, work)

    def _check_alive(self) -> None:
        if self.gone:
            raise EngineCrashed("the engine of this receiver is down")
