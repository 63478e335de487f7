"""Shapes of language models, from which their memory follows: read from config.json, or known by name.

Weights are never read, and neither torch nor transformers is needed. `find_model_shape` says in `source` where a shape
comes from. Shapes of well-known models are here because a plan is often made where the model is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

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


_SIZE_IN_NAME = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])")


def _find_known_shape(name: str) -> ModelShape | None:
    """Return a well-known shape, or for `…-12B` that of the well-known model that is nearest in size."""
    low, known = name.lower(), _read_known_shapes()
    for pattern, shape in known.items():
        if re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", low):
            return replace(shape, source=f"table of well-known models, {name}")
    said = _SIZE_IN_NAME.search(low)
    if said is None or not float(said[1]):
        return None
    wanted = int(float(said[1]) * 1e9)
    near = min(known.values(), key=lambda shape: abs(shape.parameters - wanted))
    return replace(near, given_parameters=wanted, source=f"size in the name {name}, shape of a similar model")


@cache
def _read_known_shapes() -> dict[str, ModelShape]:
    """Return the shapes of well-known models by a pattern of their names."""
    rows = yaml.safe_load(files("headway.models").joinpath("known_shapes.yaml").read_text(encoding="utf-8"))
    return {pattern: ModelShape(**row) for pattern, row in rows.items()}
