"""What memory there has to be, from the shape of the model and the settings alone. Everything in MB (10⁶ bytes).

Activations are what autograd keeps of a Llama layer in fp32, for each token: 11 hidden vectors (input, normalised and
scaled of both norms; query, key and value of all heads; attention as it came and in rows), 4 of the MLP (gate, its
activation, up, their product), and a row of its tree's mask. `tests/benchmarks/test_growth.py` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FP32 = 4
MB = 1e6
CHUNK_LOGITS = 2**24
"""Of `headway.algorithms.logprobs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model counts here."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    key_width: int
    """Key-value heads times their size."""
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Of a `transformers` decoder."""
        config = model.config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            parameters=sum(one.numel() for one in model.parameters()),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            key_width=config.num_key_value_heads * head,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
        )

    @property
    def weights_mb(self) -> float:
        """Each tensor once."""
        return self.parameters * FP32 / MB

    @property
    def served_mb(self) -> float:
        """As an engine holds them: the head is packed for products, the embedding stays as a table."""
        return self.weights_mb + (self.vocabulary * self.hidden * FP32 / MB if self.tied else 0.0)

    def layer_floats(self, tree_tokens: int) -> int:
        """Numbers kept of one layer for each token, for its gradient."""
        return 11 * self.hidden + 4 * self.intermediate + tree_tokens

    def kv_mb(self, tokens: int) -> float:
        """Keys and values of so many tokens."""
        return tokens * 2 * self.layers * self.key_width * FP32 / MB


def engine_mb(shape: Shape, *, slots: int, slot_tokens: int, prefix_tokens: int, bucket_mb: float) -> dict[str, float]:
    """While a version arrives: the served weights, the spare ones, KV, and the bucket that is being checked."""
    return {
        "weights": shape.served_mb,
        "spare weights": shape.served_mb,
        "KV": shape.kv_mb(slots * slot_tokens + prefix_tokens),
        "bucket": min(bucket_mb * 2**20 / MB, shape.weights_mb),
    }


def trainer_mb(
    shape: Shape, *, pack_tokens: int, tree_tokens: int, checkpointing: bool, versions: int
) -> dict[str, float]:
    """While a pack is trained whose trees have `tree_tokens` each; `versions` are held for engines."""
    kept = shape.layers * shape.hidden + shape.layer_floats(tree_tokens)
    if not checkpointing:
        kept = shape.layers * shape.layer_floats(tree_tokens)
    logits = min(CHUNK_LOGITS, pack_tokens * shape.vocabulary)
    return {
        "weights": shape.weights_mb,
        "gradients": shape.weights_mb,
        "optimizer": 2 * shape.weights_mb,
        "activations": (pack_tokens * kept + 3 * logits) * FP32 / MB,
        "versions held": versions * shape.weights_mb,
    }
