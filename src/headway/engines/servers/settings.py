"""How one server is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How one server is used."""

    slots: int = 16
    """Requests at a time."""
    context_tokens: int = 4096
    """Of a prompt and its answer together."""
    call_s: float = 30.0
    """For calls that a server answers at once."""
    load_s: float = 600.0
    """For loading a version."""
    first_s: float = 600.0
    """Until a server answers at the start of a run."""
    start_s: float = 600.0
    """Until a server answers that was restarted."""
    silence_s: float = 300.0
    """A request without news for this long: the server hangs."""
    drain_s: float = 5.0
    """For the last tokens of requests that were ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What a server is started with."""

    model: str
    """Directory."""
    port: int
    slots: int
    context_tokens: int
    dtype: str
    tensor_parallel: int = 1
    memory_share: float = 0.8
    """Of a device's memory."""
    cache_bytes: int = 0
    """Of KV cache, where the device is the machine itself; 0: what `memory_share` leaves."""
    threads: int = 0
    """Of the CPU, where that is the device; 0: the server decides."""
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further options of its command line, without dashes; `true` is an option without a value."""

    def further(self) -> dict[str, Any]:
        """`extra` by names that are words of Python too."""
        return {name.replace("-", "_"): value for name, value in self.extra.items()}


def make_vllm_options(launch: LaunchSettings) -> dict[str, Any]:
    """As vLLM calls them, on a command line and in its engine's arguments; `None`: left to it."""
    return {
        "model": launch.model,
        "dtype": launch.dtype,
        "seed": launch.seed,
        "max_num_seqs": launch.slots,
        "max_model_len": launch.context_tokens,
        "tensor_parallel_size": launch.tensor_parallel,
        "gpu_memory_utilization": launch.memory_share,
        "kv_cache_memory_bytes": launch.cache_bytes or None,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
    }


def make_vllm_environment(launch: LaunchSettings) -> dict[str, str]:
    """As many threads as it was given, which sleep when they wait. By itself it takes all cores but one for its own."""
    always = {"VLLM_NO_USAGE_STATS": "1"}
    if not launch.threads:
        return always
    return {
        **always,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(launch.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def make_flags(options: Mapping[str, Any]) -> list[str]:
    """Options of a command line: `{"max_num_seqs": 8, "enforce-eager": True}` → `--max-num-seqs 8 --enforce-eager`."""
    found: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        found.append("--" + name.replace("_", "-"))
        if value is not True:
            found.append(str(value))
    return found
