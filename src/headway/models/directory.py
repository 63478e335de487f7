"""Whether a directory is a model that `transformers` loads as it is, and what is wrong with it if not."""

from __future__ import annotations

import json
from pathlib import Path

from headway.errors import ConfigError

WEIGHTS = "*.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def checked(directory: Path, name: str) -> Path:
    """`directory`, absolute, or a `ConfigError` about `name`."""
    if problem := problem_with(directory):
        what, hint = problem
        raise ConfigError(what, key="pretrain", value=name, hint=hint)
    return directory.resolve()


def problem_with(directory: Path) -> tuple[str, str] | None:
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
    if not any(directory.glob(WEIGHTS)):
        if any(directory.glob("pytorch_model*.bin")):
            again = "load it once with transformers and save it with save_pretrained"
            return "has its weights as pytorch_model.bin, not as .safetensors", again
        return "has no weights: there are no .safetensors files", "is the download complete?"
    if missing := _missing_shards(directory):
        return f"lacks {len(missing)} files of weights, {missing[0]} among them", "is the download complete?"
    if not any((directory / file).is_file() for file in TOKENIZERS):
        return "has no tokenizer", f"one of {', '.join(TOKENIZERS)}; save the tokenizer beside the model"
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
