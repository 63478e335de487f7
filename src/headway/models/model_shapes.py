"""Shapes of language models, from which their memory follows: read from config.json, or known by name.

Weights are never read, and neither torch nor transformers is needed. `find_model_shape` says in `source` where a shape
comes from. Shapes of well-known models are here because a plan is often made where the model is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.models.model_cache import find_in_hub_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; of one expert where there are experts."""
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    """Whether the head is the embedding."""
    experts: int = 0
    given_parameters: int | None = None
    """Number of parameters, where it is known better than from the sizes."""
    source: str = "config.json"
    """Where the shape comes from."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate * max(self.experts, 1) + self.hidden * self.experts
        return attention + mlp + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.given_parameters or self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def widest(self) -> int:
        """Elements that one token takes in a layer while it is computed."""
        return 8 * self.hidden + 3 * self.intermediate + 2 * (self.heads + self.kv_heads) * self.head_size

    @property
    def kv_per_token(self) -> int:
        """Elements that one token takes in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def count_adapter_parameters(self, rank: int, targets: frozenset[str]) -> int:
        """Return the parameters of adapters on the named layers, or on all linear ones where none is named."""
        attention, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        sides = {
            "q_proj": self.hidden + attention,
            "k_proj": self.hidden + kv,
            "v_proj": self.hidden + kv,
            "o_proj": self.hidden + attention,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.intermediate),
        }
        known = [size for name, size in sides.items() if not targets or name in targets]
        return rank * self.layers * sum(known or sides.values())


def find_model_shape(name: str | Path | None) -> ModelShape | None:
    """Return the shape of a model directory or name; `None` where nothing is known about it."""
    if not name:
        return None
    directory: Path | None = Path(name).expanduser()
    if directory is not None and not (directory / "config.json").is_file():
        directory = find_in_hub_cache(str(name)) if re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) else None
    if directory is not None:
        return _read_shape(directory)
    return _find_known_shape(Path(name).name)


def _read_shape(directory: Path) -> ModelShape | None:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return _make_shape({**config, **(config.get("text_config") or {})})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _make_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape in a config.json of the llama or the GPT-2 kind. Raises `KeyError` for others."""
    hidden = int(config.get("hidden_size") or config["n_embd"])
    heads = int(config.get("num_attention_heads") or config["n_head"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    plain = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    return ModelShape(
        layers=int(config.get("num_hidden_layers") or config["n_layer"]),
        hidden=hidden,
        intermediate=int((config.get("moe_intermediate_size") if experts else None) or plain),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
    )


_KNOWN = {
    r"qwen2\.5-(?:math-|coder-)?0\.5b": (24, 896, 4864, 14, 2, 64, 151936, True, 0),
    r"qwen2\.5-(?:math-|coder-)?1\.5b": (28, 1536, 8960, 12, 2, 128, 151936, True, 0),
    r"qwen2\.5-(?:math-|coder-)?3b": (36, 2048, 11008, 16, 2, 128, 151936, True, 0),
    r"qwen2\.5-(?:math-|coder-)?7b": (28, 3584, 18944, 28, 4, 128, 152064, False, 0),
    r"qwen2\.5-(?:math-|coder-)?14b": (48, 5120, 13824, 40, 8, 128, 152064, False, 0),
    r"qwen2\.5-(?:math-|coder-)?32b": (64, 5120, 27648, 40, 8, 128, 152064, False, 0),
    r"qwen2\.5-(?:math-|coder-)?72b": (80, 8192, 29568, 64, 8, 128, 152064, False, 0),
    r"qwen3-0\.6b": (28, 1024, 3072, 16, 8, 128, 151936, True, 0),
    r"qwen3-1\.7b": (28, 2048, 6144, 16, 8, 128, 151936, True, 0),
    r"qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936, True, 0),
    r"qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936, False, 0),
    r"qwen3-14b": (40, 5120, 17408, 40, 8, 128, 151936, False, 0),
    r"qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936, False, 0),
    r"qwen3-30b-a3b": (48, 2048, 768, 32, 4, 128, 151936, False, 128),
    r"qwen3-235b-a22b": (94, 4096, 1536, 64, 4, 128, 151936, False, 128),
    r"deepseek-r1-distill-qwen-1\.5b": (28, 1536, 8960, 12, 2, 128, 151936, False, 0),
    r"deepseek-r1-distill-qwen-7b": (28, 3584, 18944, 28, 4, 128, 152064, False, 0),
    r"llama-3\.2-1b": (16, 2048, 8192, 32, 8, 64, 128256, True, 0),
    r"llama-3\.2-3b": (28, 3072, 8192, 24, 8, 128, 128256, True, 0),
    r"llama-3(?:\.1)?-8b": (32, 4096, 14336, 32, 8, 128, 128256, False, 0),
    r"llama-3(?:\.[13])?-70b": (80, 8192, 28672, 64, 8, 128, 128256, False, 0),
    r"mistral-7b": (32, 4096, 14336, 32, 8, 128, 32768, False, 0),
}
"""Well-known models by a pattern of their names: layers, hidden, intermediate, heads, KV heads, head size, vocabulary,
tied, experts."""
_SIZE_IN_NAME = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])")


def _find_known_shape(name: str) -> ModelShape | None:
    """Return a well-known shape, or for `…-12B` that of the well-known model that is nearest in size."""
    low = name.lower()
    for pattern, sizes in _KNOWN.items():
        if re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", low):
            return _make_known(sizes, f"table of well-known models, {name}")
    said = _SIZE_IN_NAME.search(low)
    if said is None or not float(said[1]):
        return None
    wanted = int(float(said[1]) * 1e9)
    shapes = [_make_known(sizes, "") for sizes in _KNOWN.values()]
    near = min(shapes, key=lambda shape: abs(shape.parameters - wanted))
    return replace(near, given_parameters=wanted, source=f"size in the name {name}, shape of a similar model")


def _make_known(sizes: tuple[int | bool, ...], source: str) -> ModelShape:
    layers, hidden, intermediate, heads, kv_heads, head_size, vocabulary, tied, experts = sizes
    return ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=vocabulary,
        tied=bool(tied),
        experts=experts,
        source=source,
    )
