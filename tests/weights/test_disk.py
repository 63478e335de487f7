"""Versions on a disk: the contract, damage of every kind, branches, late joiners, and what other programs read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headway.codec import decode, encode
from headway.engines.servers.directory_receiver import DirectoryReceiver
from headway.errors import TransferError
from headway.weights.base import Bucket, FileSlice, WeightReceiver, WeightSource, WeightTransport
from headway.weights.disk_transport import DiskStore, DiskTransport, VersionDirectory, load_newest_version
from headway.weights.host_transports import InProcessTransport
from headway.weights.shared_memory import PayloadReader
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import SharedArena, WeightStore

from ..contracts.weights_contract import WeightsContract
from .test_local_weights import BUCKET_MB, Real, Serving, published, updated, weights


def directory_in(path: Path, keep: int = 2) -> VersionDirectory:
    return VersionDirectory(path / "weights", keep=keep, shard_mb=2 * BUCKET_MB)


def equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


async def write(directory: VersionDirectory, version: int, tensors: Mapping[str, Tensor]) -> None:
    store = WeightStore(bucket_mb=BUCKET_MB, wire_dtype=None)
    store.publish(version, tensors)
    await DiskStore(store, directory).gather(version)


def complete(directory: VersionDirectory) -> list[int]:
    return [one.manifest.version for one in directory.list_complete()]


class TestDisk(Real, WeightsContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        source = DiskStore(published(), directory_in(self.path))
        return source, DiskTransport(), DoubleBufferedReceiver(Serving().switch)

    def corrupted(self, bucket: Bucket) -> Bucket:
        path, start, _ = bucket.payload.spans[0]
        with Path(path).open("r+b") as file:
            file.seek(start)
            byte = file.read(1)[0]
            file.seek(start)
            file.write(bytes([byte ^ 1]))
        return bucket


class TestReadBack(TestDisk):
    """The directory alone is a source, too: nothing of the trainer is left."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path
        for version in (1, 2):
            asyncio.run(write(directory_in(tmp_path), version, weights(version)))

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        return directory_in(self.path), InProcessTransport(), DoubleBufferedReceiver(Serving().switch)


def test_servers_read_versions_from_files_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        served: list[tuple[int, Path]] = []

        async def switch(version: int, path: Path) -> None:
            served.append((version, path))

        receiver = DirectoryReceiver(tmp_path / "served", switch, open_payload=PayloadReader().open)
        source = DiskStore(published(wire_dtype=None), directory_in(tmp_path / "versions"))
        await updated(source, receiver, 2, DiskTransport())
        ((version, path),) = served
        found = {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}
        assert version == receiver.version == 2 and equal(found, weights(2))

    asyncio.run(scenario())


def test_what_is_on_the_disk_is_a_sharded_model_that_others_load(tmp_path: Path) -> None:
    directory = directory_in(tmp_path)
    asyncio.run(write(directory, 3, weights(3)))
    (written,) = directory.list_complete()
    files = sorted(written.path.glob("*.safetensors"))
    assert len(files) > 2, "a version of several files"
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert equal(found, weights(3))
    index = json.loads((written.path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: (written.path / file) in files for name, file in index.items()} == dict.fromkeys(found, True)


@pytest.mark.parametrize("arena", [None, SharedArena()], ids=["heap", "shared"])
def test_a_late_joiner_seeds_itself_from_the_newest_whole_version(tmp_path: Path, arena: SharedArena | None) -> None:
    async def scenario() -> None:
        store, directory = WeightStore(bucket_mb=BUCKET_MB, wire_dtype=None, arena=arena), directory_in(tmp_path)
        source, receiver = DiskStore(store, directory), DoubleBufferedReceiver(Serving().switch)
        for version in range(5):
            store.publish(version, weights(version))
            await updated(source, receiver, version, DiskTransport())
        assert complete(directory) == [4, 3], "old versions are pruned"
        store.close()
        serving = Serving()
        assert await load_newest_version(DoubleBufferedReceiver(serving.switch), directory_in(tmp_path)) == 4
        assert equal(serving.tensors, weights(4))

    asyncio.run(scenario())


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
@pytest.mark.parametrize("file", ["manifest.json", "model-00002-of-00003.safetensors"])
def test_a_damaged_version_is_passed_over(tmp_path: Path, harm: Callable[[Path], None], file: str) -> None:
    async def scenario() -> None:
        directory, serving = directory_in(tmp_path), Serving()
        for version in (1, 2):
            await write(directory, version, weights(version))
        harm(directory.list_complete()[0].path / file)
        assert await load_newest_version(DoubleBufferedReceiver(serving.switch), directory) == 1
        assert equal(serving.tensors, weights(1))
        harm(directory.list_complete()[-1].path / file)
        with pytest.raises(TransferError, match="no whole version"):
            await load_newest_version(DoubleBufferedReceiver(serving.switch), directory)
        await write(directory, 3, weights(3))
        assert await load_newest_version(DoubleBufferedReceiver(serving.switch), directory) == 3
        assert complete(directory)[0] == 3 and len(list(directory.path.iterdir())) <= 2, "damaged ones go, too"

    asyncio.run(scenario())


def test_a_writer_that_was_killed_leaves_nothing_that_is_read_and_the_next_one_removes_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        directory = directory_in(tmp_path)
        await write(directory, 1, weights(1))
        half = directory.path / ".partial-1-abcd"
        half.mkdir()
        (half / "manifest.json").write_text("{")
        assert complete(directory) == [1]
        await write(directory, 2, weights(2))
        assert not half.exists() and complete(directory) == [2, 1]

    asyncio.run(scenario())


def test_going_back_to_a_checkpoint_makes_its_version_the_newest_and_removes_the_lost_branch(tmp_path: Path) -> None:
    async def scenario() -> None:
        directory, serving = directory_in(tmp_path, keep=4), Serving()
        for version in (5, 6, 7):
            await write(directory, version, weights(version))
        await write(directory, 6, weights(60))
        assert complete(directory) == [6, 5]
        assert await load_newest_version(DoubleBufferedReceiver(serving.switch), directory) == 6
        assert equal(serving.tensors, weights(60))

    asyncio.run(scenario())


def test_files_that_did_not_change_are_the_same_files_unless_what_is_there_was_damaged(tmp_path: Path) -> None:
    async def scenario() -> None:
        directory, serving = directory_in(tmp_path), Serving()
        for version in (1, 2, 3):
            await write(directory, version, {**weights(1), "steps": torch.tensor([version])})
            if version == 2:
                newest, before = directory.list_complete()
                numbers = [[(one.path / s.file).stat().st_ino for s in one.shards] for one in (newest, before)]
                assert [a == b for a, b in zip(*numbers, strict=True)] == [False, True, True]
                flip(newest.path / newest.shards[1].file)
        assert await load_newest_version(DoubleBufferedReceiver(serving.switch), directory) == 3
        assert equal(serving.tensors, {**weights(1), "steps": torch.tensor([3])})

    asyncio.run(scenario())


def test_gathering_again_writes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        directory = directory_in(tmp_path)
        source = DiskStore(published(), directory)
        for version in (1, 2, 1, 2):
            await source.gather(version)
        assert [one.serial for one in directory.list_complete()] == [2, 1]

    asyncio.run(scenario())


def test_a_bucket_crosses_to_another_process_as_words_and_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        directory, receiver = directory_in(tmp_path), DoubleBufferedReceiver(Serving().switch)
        await write(directory, 1, weights(1))
        manifest, buckets = await directory.gather(1)
        bucket = await anext(buckets)
        assert decode(encode(bucket)) == bucket
        await receiver.begin(manifest)
        nowhere = FileSlice(spans=((str(tmp_path / "nowhere"), 0, 4),))
        with pytest.raises(TransferError, match="nowhere cannot be read"):
            await receiver.load(replace(bucket, payload=nowhere))
        with pytest.raises(TransferError, match="not on the disk"):
            await DiskTransport().send(replace(bucket, payload=b""), receiver)

    asyncio.run(scenario())


def test_weights_that_are_overwritten_while_they_are_written_get_no_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, directory = published(), directory_in(tmp_path)
        manifest, buckets = await store.gather(2)
        found = [bucket async for bucket in buckets]
        found[1].payload[3] ^= 1
        with pytest.raises(TransferError, match="changed while it was written"):
            directory.write(manifest, found)
        assert not list(directory.path.iterdir())

    asyncio.run(scenario())
