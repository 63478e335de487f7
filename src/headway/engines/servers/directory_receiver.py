"""One version on the disk: a directory that servers load as they load any checkpoint.

    draft = Draft(root, manifest, beside=model_directory)
    draft.write(index, data) …
    directory = draft.sealed()

The bytes of a version are its tensors one after the other, which is what a safetensors file has behind its header: a
bucket is written to its place and nothing is held in memory. What lies beside the weights of the model (configuration,
tokenizer) is copied. A draft has a name of its own until it is sealed; nobody is told of it before.

A version must have the tensors that the model's own files have, by name: vLLM keeps the old weights of what a version
lacks, and says so in its log only.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from headway.errors import EngineCrashed, TransferError
from headway.weights.base import Bucket, DevicePayload, Manifest, compute_checksum

_MOST_NAMES = 4
"""That an error shows."""
WEIGHTS_FILE = "model.safetensors"
_TYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json")
"""Weights, and lists of where which of them is."""


class VersionDirectoryWriter:
    """A version that is being written. Any thread, one at a time."""

    def __init__(self, root: Path, manifest: Manifest, *, beside: Path | None = None) -> None:
        self.manifest = manifest
        self._header = _header(manifest)
        self._final = root / f"v{manifest.version}"
        self._path = root / f"v{manifest.version}.part"
        if beside is not None:
            check_tensor_names(manifest, beside)
        try:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path.mkdir(parents=True)
            for file in _small_files(beside):
                shutil.copyfile(file, self._path / file.name)
            self._file = os.open(self._path / WEIGHTS_FILE, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._file, len(self._header) + manifest.total_bytes)
            os.pwrite(self._file, self._header, 0)
        except OSError as error:
            raise TransferError(f"version {manifest.version} cannot be written to {root}: {error}") from error

    def write(self, index: int, data: memoryview) -> None:
        """Bucket `index`, which is a whole number of equal buckets from the start, or the last."""
        last, total = len(self.manifest.checksums) - 1, self.manifest.total_bytes
        start = total - data.nbytes if index == last else index * data.nbytes
        if not 0 <= index <= last or start < 0 or start + data.nbytes > total:
            raise TransferError(f"bucket {index} of version {self.manifest.version}: no place for {data.nbytes} bytes")
        at = len(self._header) + start
        try:
            while data.nbytes:
                done = os.pwrite(self._file, data, at)
                data, at = data[done:], at + done
        except OSError as error:
            raise TransferError(f"bucket {index} of version {self.manifest.version}: {error}") from error

    def sealed(self) -> Path:
        """The directory, under its own name."""
        try:
            shutil.rmtree(self._final, ignore_errors=True)
            self._path.rename(self._final)
        except OSError as error:
            raise TransferError(f"version {self.manifest.version}: {error}") from error
        return self._final

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def remove_other_versions(root: Path, kept: Path) -> None:
    """Versions that are served no more, and drafts of nobody."""
    for path in root.glob("v*"):
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)


def check_tensor_names(manifest: Manifest, model: Path) -> None:
    """That a version has the tensors that the model's files have. Raises `TransferError`."""
    ours, theirs = {tensor.name for tensor in manifest.tensors}, _names(model)
    if not theirs:
        return
    lacks, strange = theirs - ours, ours - theirs
    lacks -= {name for name in lacks if name.endswith("inv_freq") or (name == "lm_head.weight" and _tied(model))}
    strange -= {"lm_head.weight"} if _tied(model) else set()
    said = [f"{word} {_some(names)}" for word, names in (("lacks", lacks), ("has also", strange)) if names]
    if said:
        raise TransferError(f"version {manifest.version} {' and '.join(said)}, other than the model in {model}")


def _names(model: Path) -> set[str]:
    """Of the tensors in a model's safetensors files; none where there are no such files."""
    found: set[str] = set()
    for path in model.glob("*.safetensors"):
        with suppress(OSError, ValueError), path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            found |= header.keys() - {"__metadata__"}
    return found


def _tied(model: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(json.loads((model / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"))
    return False


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def _small_files(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    return [path for path in sorted(directory.iterdir()) if path.is_file() and not path.name.endswith(_NOT_COPIED)]


def _header(manifest: Manifest) -> bytes:
    """Length, JSON, and blanks up to a multiple of eight."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in manifest.tensors:
        if tensor.dtype not in _TYPES:
            raise TransferError(f"{tensor.name}: no safetensors file holds elements of type {tensor.dtype!r}")
        kind, size = _TYPES[tensor.dtype]
        end = start + size * prod(tensor.shape)
        entries[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    if start != manifest.total_bytes:
        raise TransferError(f"version {manifest.version}: {manifest.total_bytes} bytes, its tensors need {start}")
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


SwitchToDirectory = Callable[[int, Path], Awaitable[None]]
"""Serve what is in the directory as this version."""


class DirectoryReceiver:
    """`read` opens payloads that are no buffers themselves; `beside` is what else a checkpoint consists of."""

    def __init__(
        self,
        root: Path,
        switch: SwitchToDirectory,
        *,
        beside: Path | None = None,
        read: Callable[[Any], Any] = memoryview,
    ) -> None:
        self.version = -1
        self.gone = False
        """The engine is down: whoever loads is told so."""
        self._root = root
        self._switch = switch
        self._beside = beside
        self._read = read
        self._draft: VersionDirectoryWriter | None = None
        self._loaded: set[int] = set()
        self._disk: ThreadPoolExecutor | None = None

    async def begin(self, manifest: Manifest) -> None:
        self._check_alive()
        self._forget()
        draft = await self._on_disk(lambda: VersionDirectoryWriter(self._root, manifest, beside=self._beside))
        if self.gone:
            draft.close()
        self._check_alive()
        self._draft = draft

    async def load(self, bucket: Bucket) -> None:
        self._check_alive()
        draft, where = self._draft, f"bucket {bucket.index} of version {bucket.version}"
        if draft is None or draft.manifest.version != bucket.version:
            begun = "nothing" if draft is None else f"version {draft.manifest.version}"
            raise TransferError(f"{where}: {begun} was begun")
        self._loaded.discard(bucket.index)
        await self._on_disk(lambda: self._fill(draft, bucket))
        if self._draft is not draft:
            raise TransferError(f"{where}: thrown away, another version was begun meanwhile")
        self._loaded.add(bucket.index)

    async def flip(self) -> None:
        self._check_alive()
        draft = self._draft
        if draft is None:
            raise TransferError("no version was begun")
        version, wanted = draft.manifest.version, len(draft.manifest.checksums)
        if len(self._loaded) < wanted:
            raise TransferError(f"version {version} lacks {wanted - len(self._loaded)} of {wanted} buckets")
        self._forget()
        directory = await self._on_disk(draft.sealed)
        await self._switch(version, directory)
        self.version = version
        await self._on_disk(lambda: remove_other_versions(self._root, directory))

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""
        self.version, self.gone = -1, gone
        self._forget()
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.shutdown(wait=False)

    def _fill(self, draft: VersionDirectoryWriter, bucket: Bucket) -> None:
        """Write, then verify. On the thread."""
        payload = bucket.payload
        device = isinstance(payload, DevicePayload)
        data = memoryview(payload.data.cpu().numpy() if device else self._read(payload)).cast("B")
        if not 0 <= bucket.index < len(draft.manifest.checksums):
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: no such bucket")
        draft.write(bucket.index, data)
        found, wanted = payload.checksum() if device else compute_checksum(data), draft.manifest.checksums[bucket.index]
        if found != wanted:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: {found} instead of {wanted}")

    async def _on_disk(self, work: Callable[[], Any]) -> Any:
        """One thing after the other, on a thread of its own."""
        if self._disk is None:
            self._disk = ThreadPoolExecutor(1, "weights")
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _forget(self) -> None:
        draft, self._draft, self._loaded = self._draft, None, set()
        if draft is not None and self._disk is not None:
            self._disk.submit(draft.close)

    def _check_alive(self) -> None:
        if self.gone:
            raise EngineCrashed("the engine of this receiver is down")
