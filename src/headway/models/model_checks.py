"""Checks of models: is a directory complete, and can the architecture be packed and decoded token by token?

Trainers and engines put attention of their own into a model, and with it they decide which token sees which. Layers
that mix tokens in another way (convolutions, recurrences, linear attention) or bypass that attention (ALiBi, windows
that exist in a mask alone) would mix different sequences without any error. Rotary embeddings that depend on the
longest sequence of a forward pass would make the answer to one prompt depend on the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


WEIGHT_FILES = "*.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def model_error(problem: str, name: str, hint: str = "") -> ConfigError:
    """Return the error about the value `name` of `pretrain`."""
    return ConfigError(problem, key="pretrain", value=name, hint=hint)


def check_model_directory(directory: Path, name: str) -> Path:
    """Return `directory`, absolute. Raise `ConfigError` about `name` if it is not a complete model."""
    if problem := find_directory_problem(directory):
        raise model_error(problem[0], name, problem[1])
    return directory.resolve()


def find_directory_problem(directory: Path) -> tuple[str, str] | None:
    """Return what is wrong and what to do about it; None if the directory is a complete model."""
    adapter = directory / "adapter_config.json"
    if not (directory / "config.json").is_file():
        if adapter.is_file():
            return (
                f"holds a LoRA adapter only, not the model it was made for{_describe_base(adapter)}",
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
    """Return the files that the index of the weights names and that do not exist."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return []
    named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(file for file in named if not (directory / file).is_file())


def _describe_base(adapter: Path) -> str:
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return f", {base}" if base else ""


_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that change as soon as a sequence is longer than in pretraining."""


def check_attention(model: PreTrainedModel) -> None:
    """Raise `ConfigError` unless the tokens of `model` interact only in an attention that can be replaced."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    problem = None
    if getattr(model, "_is_stateful", False):
        problem = "it has recurrent layers"
    elif not getattr(model, "_supports_attention_backend", False):
        problem = "its attention cannot be replaced"
    elif kinds - _ATTENTION_LAYERS:
        problem = f"it has layers of {', '.join(sorted(kinds - _ATTENTION_LAYERS))}"
    if problem is not None:
        name = type(model).__name__
        hint = "a decoder whose layers are full or sliding attention, such as Llama, Qwen3, Gemma 3 or Mistral"
        raise model_error(f"{name} cannot be used here: {problem}", name, hint)


def check_attention_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a layer uses an option that our attention does not have and would leave out."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ConfigError(f"this model's attention uses {name}, which is not computed here", key="pretrain")


def check_rotation(whole: PreTrainedConfig, longest: int) -> None:
    """Raise `ConfigError` if a sequence of `longest` tokens would change the rotation of shorter ones beside it."""
    config = whole.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    for rotation in given.values() if given and all(isinstance(one, dict) for one in given.values()) else [given]:
        if rotation.get("rope_type") not in _LENGTH_DEPENDENT:
            continue
        limit = rotation.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest > limit:
            name, kind = config.model_type, rotation["rope_type"]
            problem = f"{name} rotates positions by {kind}, otherwise where any sequence has more than {limit} tokens"
            raise ConfigError(problem, key="sequence_length", value=longest, hint=f"at most {limit}")
