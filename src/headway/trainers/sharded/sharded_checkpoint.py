"""Checkpoints of a trainer of many ranks: the files of the local trainer, written and read by pieces.

`torch.distributed.checkpoint` writes the pieces of every rank as safetensors, and rank 0 puts them together, file by
file, without holding more than a piece of them. What is left are `model.safetensors` and `optimizer.safetensors` of
whole tensors: any number of ranks reads its own pieces from them, the local trainer reads them, `transformers` loads
them. Nothing is pickled. With LoRA the merged model goes through the memory of rank 0.

Guarantees: names, shapes and types are checked before the first weight is changed. All ranks succeed or all raise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_pieces
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces
from torch.distributed.tensor import DTensor

from headway.errors import TrainerCrashed, TrainerError
from headway.trainers.local.local_checkpoint import (
    CRITIC_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    check_tensors_match,
    read_completion_mark,
    write_completion_mark,
    write_model_config,
)
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.sharded.sharded_model import ShardedPolicy
from headway.trainers.sharded.sharded_optimizer import ShardedOptimizer
from headway.trainers.sharded.sharded_ranks import ShardedRankGroup

_PIECES = "pieces"


def save_sharded_checkpoint(
    learner: LocalLearner, directory: Path, ranks: ShardedRankGroup, tokenizer: Any = None
) -> None:
    """Write everything needed to go on from `learner.version`."""

    def begin() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_model_config(learner, directory, tokenizer)

    def end() -> None:
        shutil.rmtree(directory / _PIECES)
        write_completion_mark(learner, directory)

    _agreed(begin if ranks.first else _nothing, directory)
    files = _private(learner)
    if learner.settings.lora is None:
        files[MODEL_FILE] = _half(learner, _policy(learner).shards())
    else:
        merged = {name: tensor.cpu() for name, tensor in _policy(learner).weights().items()}
        narrow = {name: tensor.contiguous() for name, tensor in _half(learner, merged).items()}
        write = lambda: save_file(narrow, directory / MODEL_FILE, metadata={"format": "pt"})  # noqa: E731
        _agreed(write if ranks.first else _nothing, directory)
    for name, tensors in files.items():
        _write(tensors, directory, name, ranks)
    _agreed(end if ranks.first else _nothing, directory)


def load_sharded_checkpoint(learner: LocalLearner, directory: Path, ranks: ShardedRankGroup) -> None:
    """Become what `save_sharded_checkpoint`, of any number of ranks, or the local trainer wrote; or stay as before and raise."""
    found: dict[str, Any] = {}

    def read() -> None:
        version, kl = read_completion_mark(directory)
        live = _private(learner)
        if learner.settings.lora is None:
            live[MODEL_FILE] = _half(learner, _policy(learner).shards())
        for name, tensors in live.items():
            check_tensors_match(tensors, _described(directory / name), directory / name)
        found.update(version=version, kl=kl, live=live)

    _agreed(read, directory)
    for name, tensors in found["live"].items():
        wanted = {key: tensor for key, tensor in tensors.items() if not _rounded(learner, name, key, tensors)}
        if wanted:
            _read(wanted, directory / name)
    learner.version = found["version"]
    learner.kl.restore(found["kl"])


def _policy(learner: LocalLearner) -> ShardedPolicy:
    assert isinstance(learner.policy, ShardedPolicy)
    return learner.policy


def _private(learner: LocalLearner) -> dict[str, dict[str, Tensor]]:
    """What a user of the model does not need, by file, live."""
    trained = learner.trained
    files = {OPTIMIZER_FILE: _state(learner, trained.optimizer, weights=learner.settings.lora is not None)}
    if trained.critic_optimizer is not None:
        files[CRITIC_FILE] = _state(learner, trained.critic_optimizer, weights=True)
    return files


def _state(learner: LocalLearner, optimizer: Any, *, weights: bool) -> dict[str, Tensor]:
    """Moments, and masters where the local trainer has them; `weights` too where no other file has them."""
    assert isinstance(optimizer, ShardedOptimizer)
    pieces, found = optimizer.pieces, {}
    for name, tensor in optimizer.tensors().items():
        owner = name.rpartition("/")[0]
        found[name] = tensor if not tensor.ndim else pieces[owner].again(tensor)
    for name, piece in pieces.items():
        if learner.settings.precision == "bf16":
            found[f"{name}/master"] = piece.like
    if weights:
        found |= _half(learner, {name: piece.like for name, piece in pieces.items()})
    return found


def _half(learner: LocalLearner, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rounded, where the local trainer holds them so."""
    if learner.settings.precision != "bf16":
        return dict(tensors)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def _rounded(learner: LocalLearner, file: str, name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is a copy of what is in a master, and so not read."""
    return learner.settings.precision == "bf16" and (file == MODEL_FILE or f"{name}/master" in tensors)


def _write(tensors: dict[str, Tensor], directory: Path, name: str, ranks: ShardedRankGroup) -> None:
    """One file, by all ranks."""
    room = directory / _PIECES / name
    writer = HuggingFaceStorageWriter(str(room), save_distributed=True, enable_consolidation=True)
    try:
        save_pieces(tensors, storage_writer=writer)
    except CheckpointException as error:
        raise TrainerError(f"checkpoint {directory}: {_first(error)}") from error

    def name_it() -> None:
        (whole,) = room.glob("*.safetensors")
        _write_numbers({key: one for key, one in tensors.items() if not one.ndim}, whole)
        whole.rename(directory / name)

    _agreed(name_it if ranks.first else _nothing, directory)


def _write_numbers(numbers: Mapping[str, Tensor], path: Path) -> None:
    """Into the places that tensors without dimensions have in a file: putting pieces together leaves those out."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, number in numbers.items():
            file.seek(8 + length + header[name]["data_offsets"][0])
            file.write(number.detach().cpu().numpy().tobytes())


def _read(tensors: dict[str, Tensor], path: Path) -> None:
    """Pieces by those who hold them, and by every rank what is not cut."""
    try:
        load_pieces(
            {name: one for name, one in tensors.items() if isinstance(one, DTensor)}, storage_reader=_OneFile(path)
        )
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name, one in tensors.items():
                if not isinstance(one, DTensor):
                    one.copy_(file.get_tensor(name))
    except CheckpointException as error:
        raise TrainerCrashed(f"{path} was read in part: {_first(error)}") from error


class _OneFile(HuggingFaceStorageReader):
    """Of a directory that has others, too."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path.parent))
        self.fs: Any = _Only(self.fs, str(path))


class _Only:
    """A file system with one file to be found."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path

    def ls(self, _: Any) -> list[str]:
        return [self._path]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def _described(path: Path) -> dict[str, Tensor]:
    """Shapes and types of what is in a file, without reading it."""
    with safe_open(path, framework="pt") as file:
        names = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: torch.empty(one.get_shape(), dtype=_DTYPES[one.get_dtype()], device="meta")
            for name, one in names.items()
        }


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _agreed(work: Callable[[], None], directory: Path) -> None:
    """All have done their part, or all raise."""
    problem = ""
    try:
        work()
    except TrainerError as error:
        problem = str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        problem = f"{directory} cannot be used as a checkpoint: {error!r}"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next((one for one in problems if one), None)
    if first is not None:
        raise TrainerError(first)


def _first(error: CheckpointException) -> str:
    rank, failure = next(iter(error.failures.items()))
    return f"rank {rank}: {failure[0]!r}"


def _nothing() -> None:
    """Others are at work."""
