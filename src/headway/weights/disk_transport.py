"""Versions as safetensors files in a directory that trainer and engines share: another machine needs nothing else.

    00000012-v7/                      the twelfth version written here, number 7
      model-00001-of-00003.safetensors …, model.safetensors.index.json    what other engines load by its directory
      manifest.json                   tensors, buckets, checksums, files; sealed by a checksum of its own
    .partial-…/                       a version that is being written; not read by anybody

Guarantees: a version gets its name only when all of it is written. What is damaged later is found by its seal, its
sizes or the receiver's checksums, and never served. docs/architecture.md says which versions stay.

There must be only one writer (one run, one directory). A network file system may show a file late: a reader that sees
less than all of it gets a `TransferError`, and succeeds at the next attempt.
"""

import asyncio
import json
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import TransferError
from headway.weights.base import (
    Bucket,
    DevicePayload,
    FileSlice,
    Manifest,
    PublishingStore,
    WeightReceiver,
    compute_checksum,
)
from headway.weights.shared_memory import PayloadReader
from headway.weights.weight_layout import (
    Buffer,
    SafetensorsShard,
    find_file_spans,
    link_shard,
    make_shard_index,
    make_shards,
    split_into_shards,
    write_shard,
)

_FORMAT = 1
_MANIFEST, _INDEX = "manifest.json", "model.safetensors.index.json"
_COMPLETE = re.compile(r"(\d{8,})-v(-?\d+)")
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVersion:
    """A version that is completely on the disk."""

    path: Path
    serial: int
    """Number of the version among those written here."""
    manifest: Manifest
    sizes: tuple[int, ...]
    """Bytes of each bucket."""
    shards: tuple[SafetensorsShard, ...]

    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets, whose payloads say where to read."""
        heads, start = [len(shard.head()) for shard in self.shards], 0
        for index, size in enumerate(self.sizes):
            spans = find_file_spans(self.shards, heads, start, start + size)
            payload = FileSlice(spans=tuple((str(self.path / file), first, count) for file, first, count in spans))
            one = self.manifest.checksums[index]
            yield Bucket(version=self.manifest.version, index=index, checksum=one, payload=payload)
            start += size


class VersionDirectory:
    """A directory of versions. As a `WeightSource` it gives out its versions without any trainer."""

    def __init__(self, path: Path | str, *, keep: int = 2, shard_mb: float = 512) -> None:
        self.path = Path(path).absolute()
        self._keep = max(keep, 1)
        self._shard_bytes = int(shard_mb * (1 << 20))

    def list_complete(self) -> list[WrittenVersion]:
        """Return the complete versions, the one written last first. Damaged ones are left out."""
        try:
            names = self._names()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TransferError(f"{self.path} cannot be read: {error.strerror}") from error
        found = []
        for name in names:
            if _COMPLETE.fullmatch(name):
                with suppress(TransferError):
                    found.append(_read_version(self.path / name))
        return sorted(found, key=lambda one: -one.serial)

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        there = await asyncio.to_thread(self.list_complete)
        for written in there:
            if written.manifest.version == version:
                return written.manifest, _iterate_buckets(written)
        held = [written.manifest.version for written in there]
        raise TransferError(f"version {version} is not in {self.path}; there are {held}")

    def write(self, manifest: Manifest, buckets: Sequence[Bucket]) -> WrittenVersion:
        """Write a version, give it its name, then remove what is too old. Raises `TransferError`."""
        before = self.list_complete()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._sweep()
            partial = self.path / f"{_PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
            partial.mkdir()
            try:
                written = self._fill(partial, manifest, buckets, before[0] if before else None)
                final = self.path / f"{self._next_serial():08d}-v{manifest.version}"
                partial.rename(final)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        except OSError as error:
            raise TransferError(f"version {manifest.version} cannot be written: {error}") from error
        self._prune(before, manifest.version)
        return replace(written, path=final, serial=int(final.name.partition("-")[0]))

    def _fill(
        self, partial: Path, manifest: Manifest, buckets: Sequence[Bucket], before: WrittenVersion | None
    ) -> WrittenVersion:
        reader = PayloadReader()
        views = [_read_payload(reader, bucket) for bucket in buckets]
        shards, sizes = split_into_shards(manifest.tensors, self._shard_bytes), tuple(view.nbytes for view in views)
        if sum(sizes) != manifest.total_bytes or len(sizes) != len(manifest.checksums):
            raise TransferError(f"version {manifest.version}: {sum(sizes)} bytes of {manifest.total_bytes} are here")
        similar = _find_similar(before, manifest, sizes, shards)
        for shard in shards:
            head, parts = shard.head(), list(_iterate_range(views, shard.start, shard.start + shard.size))
            old = None if similar is None else similar.path / shard.file
            if old is None or not link_shard(old, partial / shard.file, head, parts):
                write_shard(partial / shard.file, head, parts)
        for index, view in enumerate(views):  # after the copy: what was overwritten meanwhile is found out
            if compute_checksum(view) != manifest.checksums[index]:
                raise TransferError(f"bucket {index} of version {manifest.version} changed while it was written")
        reader.close()
        (partial / _INDEX).write_text(json.dumps(make_shard_index(shards)), encoding="utf-8")
        body = {"manifest": manifest.to_json(), "sizes": sizes, "shards": [len(one.tensors) for one in shards]}
        (partial / _MANIFEST).write_text(_seal(body), encoding="utf-8")
        return WrittenVersion(path=partial, serial=0, manifest=manifest, sizes=sizes, shards=shards)

    def _names(self) -> list[str]:
        return [path.name for path in self.path.iterdir()]

    def _next_serial(self) -> int:
        """Return the number after those of all versions, damaged or not."""
        found = [_COMPLETE.fullmatch(name) for name in self._names()]
        return max((int(one[1]) for one in found if one), default=0) + 1

    def _prune(self, before: Sequence[WrittenVersion], version: int) -> None:
        """Remove what is too old, and what was made on a branch that the trainer has left."""
        kept = {one.path.name for one in [one for one in before if one.manifest.version < version][: self._keep - 1]}
        newest = self._next_serial() - 1
        for name in self._names():
            found = _COMPLETE.fullmatch(name)
            if found and int(found[1]) < newest and name not in kept:
                self._remove(self.path / name)

    def _sweep(self) -> None:
        """Remove what earlier writers left unfinished."""
        for path in self.path.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Remove a version, first its name, so that no reader finds half of it."""
        gone = self.path / f"{_PARTIAL}gone-{secrets.token_hex(4)}"
        with suppress(OSError):
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


class DiskStore:
    """A `PublishingStore` that writes the versions of another store to disk before it gives them out.

    Gathering a version again that is on the disk already writes nothing.
    """

    def __init__(self, store: PublishingStore, directory: VersionDirectory) -> None:
        self._store, self._directory, self.wire_dtype = store, directory, store.wire_dtype
        self.publish, self.clear, self.close = store.publish, store.clear, store.close
        self._written: dict[int, WrittenVersion] = {}
        self._writing = asyncio.Lock()

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        manifest, buckets = await self._store.gather(version)
        async with self._writing:
            written = self._written.get(version)
            if written is None or written.manifest != manifest or not written.path.is_dir():
                found = [bucket async for bucket in buckets]
                written = await asyncio.to_thread(self._directory.write, manifest, found)
                self._written = {one: there for one, there in self._written.items() if there.path.is_dir()}
                self._written[version] = written
        return manifest, _iterate_buckets(written)


class DiskTransport:
    """Hands buckets over that are on the disk."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        if not isinstance(bucket.payload, FileSlice):
            raise TransferError(f"{bucket.describe()} is not on the disk")
        return bucket

    def close(self) -> None:
        """Do nothing: versions stay on the disk."""


async def load_newest_version(receiver: WeightReceiver, directory: VersionDirectory) -> int:
    """Serve the newest complete version and return its number. Raises `TransferError` if there is none.

    A version that turns out damaged, or is removed while it is read, is passed over for the one before it.
    """
    problems = []
    for written in await asyncio.to_thread(directory.list_complete):
        try:
            await receiver.begin(written.manifest)
            for bucket in written.buckets():
                await receiver.load(bucket)
            await receiver.flip()
            return written.manifest.version
        except TransferError as error:
            problems.append(f"{written.path.name}: {error}")
    raise TransferError("; ".join([f"no whole version in {directory.path}", *problems]))


async def _iterate_buckets(written: WrittenVersion) -> AsyncIterator[Bucket]:
    for bucket in written.buckets():
        yield bucket


def _read_payload(reader: PayloadReader, bucket: Bucket) -> Buffer:
    if isinstance(bucket.payload, DevicePayload):
        raise TransferError(f"version {bucket.version} lies on a device: publish it in the memory of the host")
    return reader.open(bucket.payload)


def _iterate_range(views: Sequence[Buffer], start: int, stop: int) -> Iterator[Buffer]:
    """Yield bytes `start` to `stop` of buffers that lie one after the other."""
    place = 0
    for view in views:
        first, end = max(start - place, 0), min(stop - place, view.nbytes)
        if first < end:
            yield view[first:end]
        place += view.nbytes


def _find_similar(
    before: WrittenVersion | None, manifest: Manifest, sizes: tuple[int, ...], shards: tuple[SafetensorsShard, ...]
) -> WrittenVersion | None:
    """Return `before` if it has the layout of this version and some of its buckets may be the same."""
    if before is None or (before.manifest.tensors, before.sizes, before.shards) != (manifest.tensors, sizes, shards):
        return None
    same = set(before.manifest.checksums) & set(manifest.checksums)
    return before if same else None


def _seal(body: dict[str, Any]) -> str:
    text = json.dumps({"format": _FORMAT, **body}, sort_keys=True)
    return json.dumps({"seal": compute_checksum(text.encode()), "body": text})


def _read_version(path: Path) -> WrittenVersion:
    """Read a version. Raises `TransferError` unless all of its files have their full length."""
    try:
        outer = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        text = outer["body"]
        if outer["seal"] != compute_checksum(text.encode()):
            raise TransferError(f"{path}: its manifest is damaged")
        body = json.loads(text)
        if body["format"] != _FORMAT:
            raise TransferError(f"{path}: format {body['format']}, this build reads {_FORMAT}")
        manifest = Manifest.from_json(body["manifest"])
        shards = make_shards(manifest.tensors, [int(count) for count in body["shards"]])
        for shard in shards:
            size = (path / shard.file).stat().st_size
            if size != shard.size + len(shard.head()):
                raise TransferError(f"{path / shard.file} has {size} bytes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TransferError(f"{path} holds no whole version: {error!r}") from error
    serial = int(path.name.partition("-")[0])
    return WrittenVersion(path=path, serial=serial, manifest=manifest, sizes=tuple(body["sizes"]), shards=shards)
