"""Make engines of vLLM and SGLang: servers at given addresses, or servers started for this run.

The adapter of a server lives in the controller's process; weights come to it as to any engine. They leave it as files,
or on the trainer's own GPU as a buffer that the server opens (`shares_memory`). vLLM inside an engine's own process is
made by `in_process_engines`, with the same options. Servers and children get equal shares of the GPUs of
`actor_infer.device_mapping`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.config import ResolvedConfig
from headway.placement.machine import make_visible_gpus_env
from headway.placement.server_requirements import uses_in_process_vllm
from headway.weights.transports import Device, TransportPlan, make_receiver_end

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.engines.servers.server_dialect import ServerDialect
    from headway.engines.servers.server_process import LaunchSettings, ServerHandle
    from headway.placement.component_places import ComponentPlace
    from headway.placement.machine import Machine
    from headway.weights.device_memory import ShareableMemory

_FIRST_REPLY_S = 60.0
"""Deadline for the first answer of a running server; one that is started has ten times as long."""
_BLOCK_TOKENS = 128
"""Tokens in a block of the KV cache of a server on a CPU."""
TORCH_DTYPES: Mapping[str, Literal["float32", "bfloat16", "float16"]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "bfloat16",
}
"""Types of what is not in 8 bits."""
_BESIDE_CACHE_BYTES = 3 << 30
"""Memory of a vLLM beside weights and KV cache: activations, graphs, libraries."""
_MEMORY_LOAD_S = 60.0
"""Limit of each phase of an update through memory; files may take half of `reliability.transfer_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What all servers, or all vLLM children, of a run have in common."""

    resolved: ResolvedConfig
    model: Path
    device: Device
    replicas: int
    slots: int
    """Requests that each of them decodes together."""
    threads: int = 0
    """CPU threads of each that is started; 0: it decides itself."""
    cards: Sequence[Sequence[int]] = ()
    """GPUs of each; empty: as `actor_infer.device_mapping` says, or all of them."""
    logs: Path | None = None
    transport: TransportPlan = field(default_factory=TransportPlan)
    sleeps: bool = False
    """Whether they free the memory of their GPUs while the trainer has its turn."""
    cache_bytes: int = 0
    """KV cache of each on a GPU that it shares: vLLM fails to measure what is free while others free memory."""

    @property
    def shares_memory(self) -> bool:
        """Whether versions are opened in memory of the GPU that trainer and engine are both on."""
        return self.device == "cuda" and self.transport.kind == "cuda_ipc"

    @property
    def load_s(self) -> float:
        """Limit of each phase of loading a version."""
        half = self.resolved.config.reliability.transfer_timeout_s / 2
        return min(half, _MEMORY_LOAD_S) if self.shares_memory or uses_in_process_vllm(self.resolved) else half


def make_server_engines(servers: ServerOptions) -> list[Engine]:
    """Make one engine for each address, or for each replica that is to be started."""
    from headway.engines.servers.server_engine import ServerEngine
    from headway.engines.servers.server_process import ServerSettings
    from headway.models.model_loading import find_end_tokens, load_tokenizer

    resolved, model, logs = servers.resolved, servers.model, servers.logs
    reliability, tokenizer = resolved.config.reliability, load_tokenizer(model)
    by_url = bool(resolved.config.actor_infer.strategy_args.strategy_config.url)
    settings = ServerSettings(
        slots=servers.slots,
        context_tokens=resolved.derived.sequence_length,
        call_s=reliability.abort_timeout_s,
        load_s=servers.load_s,
        first_s=min(_FIRST_REPLY_S, reliability.transfer_timeout_s) if by_url else 10 * _FIRST_REPLY_S,
        start_s=reliability.transfer_timeout_s,
        drain_s=reliability.abort_timeout_s / 2,
        sleeps=servers.sleeps,
    )
    directory = logs.parent / "served" if logs is not None else Path(tempfile.mkdtemp(prefix="headway-"))
    engines: list[Engine] = []
    for number in range(servers.replicas):
        name, dialect = f"engine/{number}", _make_dialect(resolved)
        engines.append(
            ServerEngine(
                name,
                _make_server(servers, dialect, number),
                dialect,
                settings,
                root=directory / name.replace("/", "-"),
                end_tokens=find_end_tokens(model),
                decode=tokenizer.decode,
                model_directory=model,
                open_payload=make_receiver_end(servers.transport, name, servers.device).open_payload,
                memory=make_gpu_memory(servers.device, servers.transport) if servers.shares_memory else None,
            )
        )
    return engines


def make_gpu_memory(device: str, transport: TransportPlan) -> ShareableMemory | None:
    """Return the memory of this process's GPU, where weights stay on GPUs; none where they go through the host."""
    if device == "cpu" or (transport.kind != "cuda_ipc" and transport.backend != "nccl"):
        return None

    from headway.weights.device_memory import CudaMemory

    return CudaMemory(device)


def _make_dialect(resolved: ResolvedConfig) -> ServerDialect:
    from headway.engines.servers.sglang_dialect import SglangDialect
    from headway.engines.servers.vllm_dialect import VllmDialect

    config = resolved.config.actor_infer.strategy_args.strategy_config
    if resolved.derived.strategies["actor_infer"] == "vllm":
        return VllmDialect(launched=config.launch)
    return SglangDialect(tensor_parallel=config.tensor_model_parallel_size)


def _make_server(servers: ServerOptions, dialect: ServerDialect, number: int) -> ServerHandle:
    from headway.engines.servers.server_process import LaunchedServer, ServerHandle

    config, logs = servers.resolved.config.actor_infer.strategy_args.strategy_config, servers.logs
    if config.url:
        return ServerHandle(config.url[number])
    return LaunchedServer(
        f"engine/{number}",
        partial(make_server_command, servers, dialect, number),
        log=None if logs is None else logs / f"engine-{number}-server.log",
    )


def make_server_command(
    servers: ServerOptions, dialect: ServerDialect, number: int, port: int
) -> tuple[list[str], Mapping[str, str]]:
    """Return the command line of server `number`, and what is added to its environment."""
    config = servers.resolved.config.actor_infer.strategy_args.strategy_config
    (_, *arguments), environment = dialect.make_command(make_server_launch(servers, port))
    return [config.server_python or sys.executable, *arguments], {**environment, **make_gpu_share_env(servers, number)}


def make_server_launch(servers: ServerOptions, port: int = 0) -> LaunchSettings:
    """Return the options that each server is started with."""
    from headway.engines.servers.server_process import LaunchSettings

    resolved, infer = servers.resolved, servers.resolved.config.actor_infer
    config, on_cpu = infer.strategy_args.strategy_config, servers.device == "cpu"
    tokens = resolved.derived.sequence_length
    return LaunchSettings(
        model=str(servers.model),
        port=port,
        slots=servers.slots,
        context_tokens=tokens,
        dtype="float32" if on_cpu else TORCH_DTYPES[infer.model_args.dtype],
        tensor_parallel=config.tensor_model_parallel_size,
        memory_share=config.gpu_memory_utilization,
        cache_bytes=estimate_kv_cache_bytes(servers.model, servers.slots, tokens) if on_cpu else servers.cache_bytes,
        threads=servers.threads if on_cpu else 0,
        seed=resolved.config.seed,
        shares_memory=config.launch and servers.shares_memory,
        sleeps=servers.sleeps,
        extra=config.server_args,
    )


def estimate_kv_cache_bytes(model: Path, slots: int, context_tokens: int) -> int:
    """Estimate the KV cache of `slots` full contexts in float32 and as much again for prefixes; 0: unknown model.

    On a CPU, servers need a size in bytes: a share of "the device" would be a share of the whole machine's memory.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        token_bytes = 2 * 4 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
        return int(token_bytes * _BLOCK_TOKENS * 2 * (slots * -(-context_tokens // _BLOCK_TOKENS) + 1))
    return 0


def count_shared_cache_bytes(
    resolved: ResolvedConfig, places: Mapping[str, ComponentPlace], machine: Machine, parameters: int
) -> int:
    """Return the KV cache of a server that shares its GPU with others; 0: it measures for itself what is free."""
    config, place = resolved.config.actor_infer.strategy_args.strategy_config, places.get("engine/0")
    if place is None or not place.partners or config.tensor_model_parallel_size > 1:
        return 0
    share = int(config.gpu_memory_utilization * machine.gpu_memory_gib * (1 << 30))
    return max(share - 2 * parameters - _BESIDE_CACHE_BYTES, 0)


def make_gpu_share_env(servers: ServerOptions, number: int) -> dict[str, str]:
    """Return the environment in which server `number` sees its share of the GPUs; all of them where none are mapped."""
    resolved = servers.resolved
    if servers.cards:
        return make_visible_gpus_env(servers.cards[number])
    if servers.device == "cpu" or resolved.config.actor_infer.device_mapping is None:
        return {}
    devices = resolved.derived.devices["actor_infer"]
    share = len(devices) // servers.replicas
    return make_visible_gpus_env(devices[number * share : (number + 1) * share])
