"""Whether a directory is a model that `transformers` loads as it is, and what is wrong with it if not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


WEIGHT_FILES = "*.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_model_directory(directory: Path, name: str) -> Path:
    """`directory`, absolute, or a `ConfigError` about `name`."""
    if problem := find_directory_problem(directory):
        what, hint = problem
        raise ConfigError(what, key="pretrain", value=name, hint=hint)
    return directory.resolve()


def find_directory_problem(directory: Path) -> tuple[str, str] | None:
    """What is wrong, and what to do about it."""
    adapter = directory / "adapter_config.json"
    if not (directory / "config.json").is_file():
        if adapter.is_file():
            return (
                f"holds a LoRA adapter only, not the model it was made for{_base_of(adapter)}",
                "merge it into its base (peft: merge_and_unload, then save_pretrained) and give that directory, "
                "or give the base and train a new adapter",
            )
        ggufs = sorted(file.name for file in directory.glob("*.gguf"))
        if ggufs:
            return "holds a GGUF file, which is given by its own path", f"pretrain: {directory / ggufs[0]}"
        return (
            "is a directory without config.json, so not a model",
            "a model directory holds config.json, *.safetensors and a tokenizer; save_pretrained writes one",
        )
    if not any(directory.glob(WEIGHT_FILES)):
        if any(directory.glob("pytorch_model*.bin")):
            again = "load it once with transformers and save it with save_pretrained"
            return "has its weights as pytorch_model.bin, not as .safetensors", again
        return "has no weights: there are no .safetensors files", "is the download complete?"
    if missing := _missing_shards(directory):
        return f"lacks {len(missing)} files of weights, {missing[0]} among them", "is the download complete?"
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        return "has no tokenizer", f"one of {', '.join(TOKENIZER_FILES)}; save the tokenizer beside the model"
    return None


def _missing_shards(directory: Path) -> list[str]:
    """Files that the index of the weights names and that are not there."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return []
    named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(file for file in named if not (directory / file).is_file())


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return f", {base}" if base else ""


_KNOWN = frozenset({"full_attention", "sliding_attention"})
_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotations that are other ones as soon as a sequence is longer than in pretraining."""


def check_attention(model: PreTrainedModel) -> None:
    """Raises `ConfigError` unless the tokens of `model` meet in an attention that can be replaced."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    problem = None
    if getattr(model, "_is_stateful", False):
        problem = "it has recurrent layers"
    elif not getattr(model, "_supports_attention_backend", False):
        problem = "its attention cannot be replaced"
    elif kinds - _KNOWN:
        problem = f"it has layers of {', '.join(sorted(kinds - _KNOWN))}"
    if problem is not None:
        name = type(model).__name__
        hint = "a decoder whose layers are full or sliding attention, such as Llama, Qwen3, Gemma 3 or Mistral"
        raise ConfigError(f"{name} cannot be used here: {problem}", key="pretrain", value=name, hint=hint)


def check_rotation(whole: PreTrainedConfig, longest: int) -> None:
    """Raises `ConfigError` where a sequence of `longest` tokens would change how shorter ones beside it are rotated."""
    config = whole.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    for rotation in given.values() if given and all(isinstance(one, dict) for one in given.values()) else [given]:
        if rotation.get("rope_type") not in _BY_LENGTH:
            continue
        limit = rotation.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest > limit:
            name, kind = config.model_type, rotation["rope_type"]
            problem = f"{name} rotates positions by {kind}, otherwise where any sequence has more than {limit} tokens"
            raise ConfigError(problem, key="sequence_length", value=longest, hint=f"at most {limit}")
