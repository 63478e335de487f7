"""Checks of models: is a directory complete, and can the architecture be packed and decoded token by token?

Trainers and engines put attention of their own into a model, and with it they decide which token sees which. Layers
that mix tokens in another way (convolutions, recurrences, linear attention) or bypass that attention (ALiBi, windows
that exist in a mask alone) would mix different sequences without any error; such models are computed slowly, one
sequence after the other. Rotary embeddings that depend on the longest sequence of a forward pass would make the answer
to one prompt depend on the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError, suggest_close_match

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@cache
def print_once(line: str) -> None:
    """Print a line to the standard error output, the first time only."""
    print(line, file=sys.stderr, flush=True)


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


def find_attention_problem(model: PreTrainedModel, *, shorter_values: bool = False) -> str | None:
    """Return why tokens of `model` interact elsewhere than in an attention that can be replaced; None if they do not.

    Such a model is right only where each sequence is computed alone, through the model's own code. `shorter_values`:
    the attention that replaces its own knows values that are shorter than keys.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False):
        return "it has recurrent layers"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    if kinds - _ATTENTION_LAYERS:
        return f"it has layers of {', '.join(sorted(kinds - _ATTENTION_LAYERS))}"
    if getattr(config, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    from headway.models.attention_probe import find_call_problem

    return find_call_problem(model, shorter_values=shorter_values)


def check_attention(model: PreTrainedModel) -> None:
    """Raise `ConfigError` if `model` computes one sequence after the other, which ranks that share it cannot do."""
    problem = find_attention_problem(model)
    if problem is not None:
        name = type(model).__name__
        raise model_error(f"{name} is trained on one device: {problem}", name, "one rank of the trainer")


def check_adapter_targets(targets: Sequence[str], layers: Iterable[str], head: str = "") -> None:
    """Raise `ConfigError` for a name of `lora_target` that no layer has, or that is that of the head."""
    key, names, value = "actor_train.model_args.lora_target", sorted(set(layers)), list(targets)
    for target in targets:
        found = [name for name in names if f".{name}".endswith(f".{target}")]
        if found == [head]:
            raise ConfigError(f"{target} is the head, which has no adapters", key=key, value=value, hint="without it")
        if not found:
            known = sorted({name.rpartition(".")[2] for name in names if name != head})
            problem = f"the model has no layer {target}{suggest_close_match(target, known)}"
            hint = f"one of {', '.join(known[:20])}; or all-linear"
            raise ConfigError(problem, key=key, value=value, hint=hint)


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
