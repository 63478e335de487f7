"""The server's side of a weight update: buckets become a directory, and the server is told to load it.

The bytes of a version are its tensors one after the other, which is what a safetensors file has behind its header: a
bucket is written to its place in the file, and nothing is held in memory. It is verified after it was written, so that
memory which is overwritten while it is read is found out. The other files of the model (configuration, tokenizer) are
copied. The directory has a temporary name until it is complete; no server is told of it before. The directory that is
served stays on the disk, the ones before it are removed.

A version must have the tensors that the model's own files have, by name: vLLM keeps the old weights of what a version
lacks, and says so in its log only.
"""

import json
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.errors import TransferError
from headway.weights.base import Bucket, DevicePayload, Manifest, OpenPayload, StagedReceiver, compute_checksum
from headway.weights.weight_layout import SafetensorsShard, compute_manifest_layout

_MOST_NAMES = 4
"""Names that an error shows."""
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json")
"""Weights, and the lists of which file holds which of them."""

SwitchToDirectory = Callable[[int, Path], Awaitable[None]]
"""Serves what is in the directory as this version."""


class VersionDirectoryWriter:
    """A version that is written to the disk. Used by one thread at a time.

    `model_directory` holds the other files of a checkpoint; `open_payload` opens payloads that are not buffers.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        *,
        model_directory: Path | None = None,
        open_payload: OpenPayload = memoryview,
    ) -> None:
        self.manifest = manifest
        self.path = root / f"v{manifest.version}"
        """Where it lies once it is complete."""
        self._open_payload = open_payload
        self._model_directory = model_directory
        self._draft = root / f"v{manifest.version}.part"
        self._weights = self._draft / "model.safetensors"
        self._header = b""

    def create(self) -> None:
        """Make the directory with all but the weights. Raises `TransferError` for a version that no model can load."""
        manifest, model_directory = self.manifest, self._model_directory
        if model_directory is not None:
            check_tensor_names(manifest, model_directory)
        compute_manifest_layout(manifest)
        size = manifest.total_bytes
        shard = SafetensorsShard(file=self._weights.name, tensors=manifest.tensors, start=0, size=size)
        self._header = shard.head()
        try:
            shutil.rmtree(self._draft, ignore_errors=True)
            self._draft.mkdir(parents=True)
            for file in [] if model_directory is None else sorted(model_directory.iterdir()):
                if file.is_file() and not file.name.endswith(_NOT_COPIED):
                    shutil.copyfile(file, self._draft / file.name)
            with self._weights.open("wb") as weights:
                weights.write(self._header)
                weights.truncate(len(self._header) + manifest.total_bytes)
        except OSError as error:
            where = self.path.parent
            raise TransferError(f"version {manifest.version} cannot be written to {where}: {error}") from error

    def load(self, bucket: Bucket) -> None:
        """Write a bucket to its place, then verify it. Raises `TransferError`."""
        given = bucket.payload
        payload: Any = given if isinstance(given, DevicePayload) else self._open_payload(given)
        on_device = isinstance(payload, DevicePayload)
        data = memoryview(payload.data.cpu().numpy() if on_device else payload).cast("B")
        place = self.manifest.locate_bucket(bucket.index, data.nbytes)
        try:
            with self._weights.open("r+b", buffering=0) as weights:
                weights.seek(len(self._header) + place.start)
                rest = data
                while rest.nbytes:
                    rest = rest[weights.write(rest) :]
        except OSError as error:
            raise TransferError(f"{bucket.describe()}: {error}") from error
        self.manifest.verify(bucket, payload.checksum() if on_device else compute_checksum(data))

    def publish(self) -> None:
        """Give the directory its final name."""
        try:
            shutil.rmtree(self.path, ignore_errors=True)
            self._draft.rename(self.path)
        except OSError as error:
            raise TransferError(f"version {self.manifest.version}: {error}") from error

    def remove_others(self) -> None:
        """Remove the versions that are served no more, and what is left of unfinished ones."""
        for path in self.path.parent.glob("v*"):
            if path != self.path:
                shutil.rmtree(path, ignore_errors=True)


class DirectoryReceiver(StagedReceiver[VersionDirectoryWriter]):
    """Writes versions below `root`; `switch` makes the server load one. The rest: see `VersionDirectoryWriter`."""

    def __init__(
        self,
        root: Path,
        switch: SwitchToDirectory,
        *,
        model_directory: Path | None = None,
        open_payload: OpenPayload = memoryview,
    ) -> None:
        super().__init__()
        self._root, self._switch = root, switch
        self._model_directory, self._open_payload = model_directory, open_payload

    async def _make_stage(self, manifest: Manifest) -> VersionDirectoryWriter:
        writer = VersionDirectoryWriter(
            self._root, manifest, model_directory=self._model_directory, open_payload=self._open_payload
        )
        await self._run_on_thread(writer.create)
        return writer

    async def _serve(self, stage: VersionDirectoryWriter) -> None:
        await self._run_on_thread(stage.publish)
        await self._switch(stage.manifest.version, stage.path)
        self._served = stage

    async def _release_previous(self) -> None:
        await self._run_on_thread(self._served.remove_others)


def check_tensor_names(manifest: Manifest, model: Path) -> None:
    """Raise `TransferError` unless a version has the tensors that the model's files have."""
    ours, theirs = {tensor.name for tensor in manifest.tensors}, _read_tensor_names(model)
    if not theirs:
        return
    tied = _has_tied_embedding(model)
    missing, unknown = theirs - ours, ours - theirs
    missing -= {name for name in missing if name.endswith("inv_freq") or (name == "lm_head.weight" and tied)}
    unknown -= {"lm_head.weight"} if tied else set()
    problems = [f"{word} {_join(names)}" for word, names in (("lacks", missing), ("has also", unknown)) if names]
    if problems:
        raise TransferError(f"version {manifest.version} {' and '.join(problems)}, other than the model in {model}")


def _read_tensor_names(model: Path) -> set[str]:
    """Return the names in a model's safetensors files; none where there are no such files."""
    names: set[str] = set()
    for path in model.glob("*.safetensors"):
        with suppress(OSError, ValueError), path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            names |= header.keys() - {"__metadata__"}
    return names


def _has_tied_embedding(model: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(json.loads((model / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"))
    return False


def _join(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
