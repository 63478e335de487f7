"""What a native engine may be told, validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """One replica. Memory: `slots · slot_tokens` tokens of KV, `prefix_tokens` more, and two copies of the weights."""

    slots: int = 32
    """Requests that are worked on together."""
    slot_tokens: int = 2048
    """Longest sequence, prompt and answer together."""
    prefill_tokens: int = 128
    """Prompt tokens in one step beside those that decode: what a long prompt may delay the others by."""
    prefix_tokens: int | None = None
    """Prompt tokens kept for members of a group that come later; as many as an eighth of the slots hold, 0: none."""
    stream_tokens: int = 8
    """Actions between two reports into a `Progress`."""
    threads: int = 1
    """Threads of one torch operation."""
    seed: int = 0
    """With the request's id and the position it decides every draw. Equal on all replicas of a run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; weights arrive in any type. Draws and log-probabilities are float32 always."""

    def __post_init__(self) -> None:
        for key in ("slots", "prefill_tokens", "stream_tokens", "threads"):
            if getattr(self, key) < 1:
                raise ConfigError("must be at least 1", key=key, value=getattr(self, key))
        if self.slot_tokens < 2:
            raise ConfigError("must hold a prompt and an answer", key="slot_tokens", value=self.slot_tokens)
        if self.prefix_tokens is not None and self.prefix_tokens < 0:
            raise ConfigError("must not be negative", key="prefix_tokens", value=self.prefix_tokens)
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError("must be float32 or bfloat16", key="dtype", value=self.dtype)

    @property
    def kept_tokens(self) -> int:
        """Tokens of prompts that are kept for later."""
        return max(self.slots // 8, 1) * self.slot_tokens if self.prefix_tokens is None else self.prefix_tokens
