"""How a server is used, and with what it is started. Talks to no server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How one server is used."""

    slots: int = 16
    """Requests that it works on together."""
    context_tokens: int = 4096
    """Most tokens of a prompt and its answer together."""
    call_s: float = 30.0
    """Limit of calls that a server answers at once."""
    load_s: float = 600.0
    """Limit of loading a version."""
    first_s: float = 600.0
    """Limit of the first answer of a server at the start of a run."""
    start_s: float = 600.0
    """Limit of the first answer of a server that was restarted."""
    silence_s: float = 300.0
    """A server that brings nothing for a request in this time hangs."""
    drain_s: float = 5.0
    """Limit of the wait for the last tokens of requests that were ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What a server, or vLLM in an engine's process, is started with."""

    model: str
    """Directory of the model."""
    port: int
    slots: int
    context_tokens: int
    dtype: str
    tensor_parallel: int = 1
    memory_share: float = 0.8
    """Share of a device's memory."""
    cache_bytes: int = 0
    """Size of the KV cache, where the device is the machine itself; 0: what `memory_share` leaves."""
    threads: int = 0
    """Threads of the CPU, where that is the device; 0: the server decides."""
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further options of its command line, without dashes in front; `true` is an option without a value."""

    def extra_arguments(self) -> dict[str, Any]:
        """Return `extra` by names that are valid in Python."""
        return {name.replace("-", "_"): value for name, value in self.extra.items()}


def make_vllm_options(launch: LaunchSettings) -> dict[str, Any]:
    """Return vLLM's options by the names of its engine's arguments; None leaves one to vLLM."""
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
    """Return environment variables that limit vLLM to its threads; by itself it takes all cores but one."""
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
    """Return a command line: `{"max_num_seqs": 8, "enforce-eager": True}` → `--max-num-seqs 8 --enforce-eager`."""
    flags: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags
