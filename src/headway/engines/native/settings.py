"""The settings of a native engine, validated when they are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterSettings:
    """Adapters of an engine that serves them apart from their base."""

    rank: int
    scale: float
    targets: tuple[str, ...] = ()
    """Last parts of the names of layers. Empty means all linear layers but the head."""
    load_base: Callable[[], Mapping[str, Tensor]]
    """Returns the weights of the model without adapters, by the names of `transformers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """One replica. It needs two copies of the weights, or one without `spare_weights`, and a KV cache.

    On a CPU the cache has `slots · slot_tokens` tokens and `prefix_tokens` more. On a GPU it has pages that sequences
    take as they grow, so that many slots cost nothing where sequences are short.
    """

    slots: int = 0
    """Most requests that are worked on together; 0: 32 on a CPU, 512 on a GPU."""
    slot_tokens: int = 2048
    """Longest sequence, prompt and answer together."""
    prefill_tokens: int | None = None
    """Prompt tokens in one step beside those that decode: how much a long prompt may delay the others. By default 128
    on a CPU, 8192 in a block of steps on a GPU."""
    prefix_tokens: int | None = None
    """Tokens saved for requests that come later; by default as many as an eighth of the slots hold. On a GPU they are
    part of `kv_cache_bytes`, and pages that nobody else needs hold more."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache on a GPU. By default as much as all slots and prefixes can fill, and at most nine tenths
    of what is free beside the weights."""
    host_cache_bytes: int | None = None
    """Host memory for the KV of sequences that had to make room on a GPU; what does not fit is computed again. By
    default a quarter of what is free at the start."""
    spare_weights: bool = True
    """Whether a version arrives beside the weights that are served. Otherwise it replaces them tensor by tensor, which
    halves their memory, and no token is made from its first byte to its flip."""
    page_tokens: int = 64
    """Tokens of a page of the KV cache on a GPU."""
    stream_tokens: int = 8
    """Actions between two reports into a `Progress`."""
    threads: int = 1
    """Threads of one torch operation."""
    seed: int = 0
    """Decides every draw, with the request's id and the position. Equal on all replicas of a run."""
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] = "float32"
    """Type of the computation; weights arrive in any type. Draws and log-probabilities are always float32. float16, on
    GPUs only, is as fast as bfloat16 and rounds eight times finer, but fails when a number is beyond 65504. fp8, on
    GPUs that multiply it, is bfloat16 with linear layers in 8 bits (`quantized_products`)."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache on a GPU: that of the computation, or half of its bytes."""
    device: str = "cpu"
    """Where the model lives: `cpu`, `cuda`, `cuda:1`, …"""
    adapters: AdapterSettings | None = None
    """Adapters that arrive as versions of their own, on top of base weights that never change; None: versions are whole
    models."""
    steps_per_sync: int = 8
    """Decode steps per host synchronisation, on GPUs only. More steps mean less work for the host, but an end, an abort
    or other weights take effect later."""

    def __post_init__(self) -> None:
        if self.slots == 0:
            object.__setattr__(self, "slots", 32 if self.device == "cpu" else 512)
        for key in ("slots", "prefill_tokens", "stream_tokens", "threads", "steps_per_sync", "page_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError("must be at least 1", key=key, value=value)
        if self.slot_tokens < 2:
            raise ConfigError("must hold a prompt and an answer", key="slot_tokens", value=self.slot_tokens)
        for key in ("prefix_tokens", "kv_cache_bytes", "host_cache_bytes"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ConfigError("must not be negative", key=key, value=value)
        if self.dtype not in ("float32", "bfloat16", "float16", "fp8"):
            raise ConfigError("must be float32, bfloat16, float16 or fp8", key="dtype", value=self.dtype)
        if self.kv_dtype not in ("auto", "fp8"):
            raise ConfigError("must be auto or fp8", key="kv_dtype", value=self.kv_dtype)
        if self.dtype == "float16" and self.device == "cpu":
            raise ConfigError("CPUs do not multiply it", key="dtype", value=self.dtype, hint="float32")
        if self.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise ConfigError("must be a known device", key="device", value=self.device, hint="cpu or cuda")

    @property
    def prefill_step_tokens(self) -> int:
        """Most prompt tokens in one step."""
        return self.prefill_tokens or (128 if self.device == "cpu" else 8192)

    @property
    def prefix_cache_tokens(self) -> int:
        """Most tokens whose KV is saved for later requests."""
        return max(self.slots // 8, 1) * self.slot_tokens if self.prefix_tokens is None else self.prefix_tokens

    def halve_batch(self) -> NativeSettings:
        """Return settings for an engine that ran out of memory: half as much at once."""
        return replace(
            self,
            slots=max(1, self.slots // 2),
            prefill_tokens=max(16, self.prefill_step_tokens // 2),
            kv_cache_bytes=None if self.kv_cache_bytes is None else self.kv_cache_bytes // 2,
        )
