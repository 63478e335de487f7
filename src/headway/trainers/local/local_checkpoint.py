"""Checkpoints of a learner: safetensors and JSON, nothing pickled.

    model.safetensors, config.json      loaded directly by `transformers` (LoRA merged)
    optimizer.safetensors               moments; with LoRA the adapters too
    critic.safetensors                  the critic, if there is one
    trainer.json                        version, KL coefficient and checksums; written last (`checkpoint_mark`)

Guarantees: loading checks contents, names, shapes and types of everything before the first weight is changed. The
precision is that of training, so the step after a load equals, bit for bit, the step that would have followed the save.
With LoRA the frozen weights are those that the learner was made with.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.errors import TrainerError
from headway.trainers.checkpoint_mark import read_completion_mark, verify_checkpoint, write_completion_mark
from headway.trainers.local.local_optimizer import overwrite_tensors
from headway.trainers.local.optimizer_steps import StepLearner

MODEL_FILE, OPTIMIZER_FILE, CRITIC_FILE = "model.safetensors", "optimizer.safetensors", "critic.safetensors"


def save_checkpoint(learner: StepLearner, directory: Path, tokenizer: Any = None) -> None:
    """Write everything needed to continue from `learner.version`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_tensors(learner.weights(), directory / MODEL_FILE)
        write_model_config(learner, directory, tokenizer)
        for name, tensors in _optimizer_files(learner).items():
            write_tensors(tensors, directory / name)
        write_completion_mark(directory, version=learner.version, kl=learner.kl.state())
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainerError(f"checkpoint {directory}: {error}") from error


def load_checkpoint(learner: StepLearner, directory: Path) -> list[str]:
    """Restore what `save_checkpoint` wrote, and return what is worth a line.

    Raise `TrainerError` and change nothing if that is impossible, or if a file that is needed is damaged.
    """
    live = _optimizer_files(learner)
    if learner.settings.lora is None:
        live[MODEL_FILE] = learner.weights()
    mark, notes = read_completion_mark(directory), verify_checkpoint(directory, live.keys())
    try:
        stored = {name: load_file(directory / name) for name in live}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise TrainerError(f"{directory} holds no checkpoint of this trainer: {error!r}") from error
    for name, tensors in live.items():
        check_tensors_match(tensors, stored[name], directory / name)
    for name, tensors in live.items():
        overwrite_tensors(tensors, stored[name])
    learner.version = mark.version
    learner.kl.restore(mark.kl)
    return notes


def _optimizer_files(learner: StepLearner) -> dict[str, dict[str, Tensor]]:
    """Return the live tensors of each optimizer by file, with the weights that no other file has."""
    policy, *critic = learner.optimizers
    files = {OPTIMIZER_FILE: policy.state_tensors() if learner.settings.lora is None else policy.all_tensors()}
    for one in critic:
        files[CRITIC_FILE] = one.all_tensors()
    return files


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def write_model_config(learner: StepLearner, directory: Path, tokenizer: Any) -> None:
    """Write what is needed beside the weights to load the model again."""
    learner.save_model_config(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def check_tensors_match(live: Mapping[str, Tensor], stored: Mapping[str, Tensor], path: Path) -> None:
    """Raise `TrainerError` unless `stored` has the names, shapes and types of `live`."""
    for name in live.keys() ^ stored.keys():
        raise TrainerError(f"{path}: {name} is only in {'the model' if name in live else 'the file'}")
    for name, tensor in live.items():
        if (tensor.shape, tensor.dtype) != (stored[name].shape, stored[name].dtype):
            raise TrainerError(f"{path}: {name} is {stored[name].dtype} {tuple(stored[name].shape)} in the file")
