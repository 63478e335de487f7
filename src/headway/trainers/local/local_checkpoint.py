"""Checkpoints of a learner: safetensors and JSON, nothing pickled.

    model.safetensors, config.json      what `transformers` loads directly (LoRA merged)
    optimizer.safetensors               moments; with LoRA the adapters too
    critic.safetensors                  where there is one
    trainer.json                        version and KL coefficient; written last, so that it vouches for the rest

Guarantees: reading checks names, shapes and types of everything before the first weight is changed. The precision is
that of training, so the step after a load is the step that would have been, bit for bit. With LoRA the frozen weights
are those that the learner was made with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.errors import TrainerError
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.local_optimizer import overwrite_tensors
from headway.trainers.local.policy_model import COMPUTE_DTYPES

_FORMAT = 1
_MARK = "trainer.json"
MODEL_FILE, OPTIMIZER_FILE, CRITIC_FILE = "model.safetensors", "optimizer.safetensors", "critic.safetensors"


def save_checkpoint(learner: LocalLearner, directory: Path, tokenizer: Any = None) -> None:
    """Write everything needed to go on from `learner.version`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(learner.policy.weights(), directory / MODEL_FILE)
        write_model_config(learner, directory, tokenizer)
        for name, tensors in _private_files(learner).items():
            _write(tensors, directory / name)
        write_completion_mark(learner, directory)
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainerError(f"checkpoint {directory}: {error}") from error


def load_checkpoint(learner: LocalLearner, directory: Path) -> None:
    """Become what `save_checkpoint` wrote, or stay as before and raise."""
    try:
        version, kl = read_completion_mark(directory)
        live = _private_files(learner)
        if learner.settings.lora is None:
            live[MODEL_FILE] = learner.policy.weights()
        read = {name: load_file(directory / name) for name in live}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise TrainerError(f"{directory} holds no checkpoint of this trainer: {error!r}") from error
    for name, tensors in live.items():
        check_tensors_match(tensors, read[name], directory / name)
    for name, tensors in live.items():
        overwrite_tensors(tensors, read[name])
    learner.version = version
    learner.kl.restore(kl)


def _private_files(learner: LocalLearner) -> dict[str, dict[str, Tensor]]:
    """What a user of the model does not need, by file."""
    trained = learner.trained
    adapters = learner.settings.lora is not None
    files = {OPTIMIZER_FILE: trained.optimizer.everything() if adapters else trained.optimizer.tensors()}
    if trained.critic_optimizer is not None:
        files[CRITIC_FILE] = trained.critic_optimizer.everything()
    return files


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def write_completion_mark(learner: LocalLearner, directory: Path) -> None:
    """When everything else is there."""
    state = {"format": _FORMAT, "version": learner.version, "kl": learner.kl.state()}
    (directory / _MARK).write_text(json.dumps(state), encoding="utf-8")


def read_completion_mark(directory: Path) -> tuple[int, dict[str, float]]:
    """Version, and state of who steers the penalty."""
    state = json.loads((directory / _MARK).read_text(encoding="utf-8"))
    version, kl = int(state["version"]), {str(key): float(value) for key, value in state["kl"].items()}
    if state["format"] != _FORMAT:
        raise TrainerError(f"{directory}: format {state['format']}, this build reads {_FORMAT}")
    return version, kl


def write_model_config(learner: LocalLearner, directory: Path, tokenizer: Any) -> None:
    """What `transformers` reads beside the weights."""
    causal = learner.policy.causal
    causal.config.dtype = COMPUTE_DTYPES[learner.settings.precision]
    causal.config.save_pretrained(directory)
    if getattr(causal, "generation_config", None) is not None:
        # As it came: `save_pretrained` refuses what many published models have, such as a temperature without sampling.
        causal.generation_config.to_json_file(directory / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def check_tensors_match(live: Mapping[str, Tensor], read: Mapping[str, Tensor], path: Path) -> None:
    """Raises `TrainerError` unless `read` has the names, shapes and types of `live`."""
    for name in live.keys() ^ read.keys():
        raise TrainerError(f"{path}: {name} is only in {'the model' if name in live else 'the file'}")
    for name, tensor in live.items():
        if (tensor.shape, tensor.dtype) != (read[name].shape, read[name].dtype):
            raise TrainerError(f"{path}: {name} is {read[name].dtype} {tuple(read[name].shape)} in the file")
