"""Checkpoints of a trainer of many ranks: the files of the local trainer, written and read shard by shard.

All ranks write one file together (`shared_file`). The result is `model.safetensors` and `optimizer.safetensors` with
full tensors: any number of ranks can read its own shards from them, and the local trainer and `transformers` can load
them. Nothing is pickled. With LoRA the merged model goes through the memory of rank 0.

Guarantees: contents, names, shapes and types are checked before the first weight is changed. All ranks succeed, or
all raise.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor

from headway.errors import TrainerCrashed, TrainerError
from headway.trainers.checkpoint_mark import (
    CheckpointMark,
    read_completion_mark,
    verify_checkpoint,
    write_completion_mark,
)
from headway.trainers.local.local_checkpoint import (
    CRITIC_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    check_tensors_match,
    write_model_config,
    write_tensors,
)
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.optimizer_steps import StepLearner
from headway.trainers.sharded.sharded_model import ShardedWeights
from headway.trainers.sharded.sharded_optimizer import ShardedOptimizer
from headway.trainers.sharded.shared_file import begin_file, write_shards

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def save_sharded_checkpoint(learner: StepLearner, directory: Path, *, is_first: bool, tokenizer: Any = None) -> None:
    """Write everything needed to continue from `learner.version`; `is_first` on rank 0."""

    def begin() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_model_config(learner, directory, tokenizer)

    _agree(begin if is_first else None, directory)
    files = _optimizer_files(learner)
    if learner.settings.lora is None:
        files[MODEL_FILE] = _round(learner, get_sharded_policy(learner).shards())
    else:
        merged = _round(learner, {name: tensor.cpu() for name, tensor in learner.weights().items()})
        _agree((lambda: write_tensors(merged, directory / MODEL_FILE)) if is_first else None, directory)
    for name, tensors in files.items():
        _write_file(tensors, directory / name, is_first)
    mark = partial(write_completion_mark, directory, version=learner.version, kl=learner.kl.state())
    _agree(mark if is_first else None, directory)


def load_sharded_checkpoint(learner: StepLearner, directory: Path, *, is_first: bool) -> list[str]:
    """Restore a checkpoint of any number of ranks, or of the local trainer, and return what is worth a line.

    Raise `TrainerError` and change nothing if that is impossible. Rank 0 (`is_first`) reads all of it to check it.
    """
    live = _optimizer_files(learner)
    if learner.settings.lora is None:
        live[MODEL_FILE] = _round(learner, get_sharded_policy(learner).shards())
    mark: list[CheckpointMark] = []
    notes: list[str] = []

    def check() -> None:
        mark.append(read_completion_mark(directory))
        notes.extend(verify_checkpoint(directory, live.keys()) if is_first else ())
        for name, tensors in live.items():
            check_tensors_match(tensors, _read_shapes(directory / name), directory / name)

    _agree(check, directory)
    for name, tensors in live.items():
        needed = {key: tensor for key, tensor in tensors.items() if not _has_master(learner, name, key, tensors)}
        if needed:
            _read_file(needed, directory / name)
    learner.version = mark[0].version
    learner.kl.restore(mark[0].kl)
    return notes


def get_sharded_policy(learner: StepLearner) -> ShardedWeights:
    """Return the policy of a learner whose model is cut over ranks."""
    policy = getattr(learner, "policy", None)
    assert isinstance(policy, ShardedWeights)
    return policy


def _optimizer_files(learner: StepLearner) -> dict[str, dict[str, Tensor]]:
    """Return the live tensors of each optimizer by file, with the weights that no other file has."""
    policy, *critic = learner.optimizers
    files = {OPTIMIZER_FILE: _optimizer_tensors(learner, policy, weights=learner.settings.lora is not None)}
    for one in critic:
        files[CRITIC_FILE] = _optimizer_tensors(learner, one, weights=True)
    return files


def _optimizer_tensors(learner: StepLearner, optimizer: Optimizer, *, weights: bool) -> dict[str, Tensor]:
    """Return moments, masters where the local trainer has them, and `weights` where no other file has them."""
    assert isinstance(optimizer, ShardedOptimizer)
    shards, found = optimizer.shards, {}
    for name, tensor in optimizer.state_tensors().items():
        parameter = name.rpartition("/")[0]
        found[name] = tensor if not tensor.ndim else shards[parameter].with_local(tensor)
    if learner.has_half_weights:
        found |= {f"{name}/master": shard.sharded for name, shard in shards.items()}
    if weights:
        found |= _round(learner, {name: shard.sharded for name, shard in shards.items()})
    return found


def _round(learner: StepLearner, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round weights to bf16 where the local trainer holds them so."""
    if not learner.has_half_weights:
        return dict(tensors)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def _has_master(learner: StepLearner, file: str, name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor is a rounded copy of a master, and so need not be read."""
    return learner.has_half_weights and (file == MODEL_FILE or f"{name}/master" in tensors)


def _write_file(tensors: dict[str, Tensor], path: Path, is_first: bool) -> None:
    """Write one file together with all ranks."""
    _agree(partial(begin_file, tensors, path) if is_first else None, path.parent)
    _agree(partial(write_shards, tensors, path, is_first=is_first), path.parent)


def _read_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Read this rank's shards, and all tensors that are not sharded."""
    sharded = {name: one for name, one in tensors.items() if isinstance(one, DTensor)}
    try:
        load_shards(sharded, storage_reader=_SingleFileReader(path))
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name, one in tensors.items():
                if name not in sharded:
                    one.copy_(file.get_tensor(name))
    except CheckpointException as error:
        raise TrainerCrashed(f"{path} was read in part: {_first_failure(error)}") from error


class _SingleFileReader(HuggingFaceStorageReader):
    """Reads one file of a directory that has others too."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path.parent))
        self.fs: Any = _SingleFileSystem(self.fs, str(path))


class _SingleFileSystem:
    """A file system that lists only one file."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path

    def ls(self, _: Any) -> list[str]:
        return [self._path]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def _read_shapes(path: Path) -> dict[str, Tensor]:
    """Return tensors without memory that have the shapes and types of those in a file."""
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: torch.empty(one.get_shape(), dtype=_DTYPES[one.get_dtype()], device="meta")
            for name, one in slices.items()
        }


def _agree(work: Callable[[], None] | None, directory: Path) -> None:
    """Do this rank's `work`, if it has any. Raise `TrainerError` on all ranks if it fails on one."""
    problem = ""
    try:
        if work is not None:
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


def _first_failure(error: CheckpointException) -> str:
    rank, failure = next(iter(error.failures.items()))
    return f"rank {rank}: {failure[0]!r}"
