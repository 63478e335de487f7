"""Which architectures can be computed token by token and packed: those whose tokens meet in attention alone.

Trainers and engines put attention of their own into a model, and with it they decide who sees whom. Layers that mix
tokens in another way (convolutions, recurrences, linear attention) or do not ask that attention (ALiBi, windows that
are in a mask alone) would see the tokens of others, and forget their own, without any error. Rotations
that depend on the longest sequence of a forward would make the answer to one prompt depend on others beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

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
