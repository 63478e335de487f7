"""Make engines of vLLM and SGLang: servers at given addresses, or servers started for this run.

The adapter of a server lives in the controller's process; weights come to it as to any engine. They leave it as files,
or on the trainer's own GPU as a buffer that the server opens (`shares_memory`). vLLM inside an engine's own process is
made by `in_process_engines`, with the same options. Servers and children get equal shares of the GPUs of
`actor_infer.device_mapping`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.config import ResolvedConfig
from headway.config.server_versions import check_server_version
from headway.config.strategies import find_server_package
from headway.errors import ConfigError
from headway.extras import suggest_install
from headway.launch.transports import Device, TransportPlan, make_receiver_end
from headway.processes.child_process import OLDEST_PYTHON

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.engines.servers.server_dialect import ServerDialect
    from headway.engines.servers.server_process import LaunchSettings, ServerHandle
    from headway.launch.component_places import ComponentPlace
    from headway.launch.machine import Machine
    from headway.weights.device_memory import ShareableMemory

_KEY = "actor_infer.strategy_args.strategy_config"
_FIRST_REPLY_S = 60.0
"""Deadline for the first answer of a running server; one that is started has ten times as long."""
_MAX_VLLM_TEMPERATURE = 2.0
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


def uses_external_engines(resolved: ResolvedConfig) -> bool:
    """Return whether the engines of this run are vLLM or SGLang, in whatever process."""
    config = resolved.config.actor_infer.strategy_args.strategy_config
    return bool(config.url or config.launch or config.in_process)


def uses_in_process_vllm(resolved: ResolvedConfig) -> bool:
    """Return whether vLLM runs inside engine processes of this run."""
    return resolved.config.actor_infer.strategy_args.strategy_config.in_process


def check_shared_gpu_memory(resolved: ResolvedConfig, places: Mapping[str, ComponentPlace]) -> None:
    """Check that servers which are to open the trainer's memory are on its GPUs. Raises `ConfigError`.

    Engines of our own see other GPUs as well. Servers see their own, and vLLM wants a handle for each that it sees.
    """
    config = resolved.config.actor_infer.strategy_args.strategy_config
    if not uses_external_engines(resolved) or config.url:
        return
    trained = {card for name, place in places.items() if name.startswith("trainer") for card in place.cards}
    apart = [name for name, place in places.items() if name.startswith("engine/") and not trained & set(place.cards)]
    problem = f"{apart[0]} is on no GPU of the trainer" if apart else ""
    if config.launch and config.tensor_model_parallel_size > 1:
        problem = "a server whose layers are on several GPUs loads files"
    if problem:
        raise ConfigError(problem, key="weight_transfer.transport", value="cuda_ipc", hint="auto")


def check_server_requirements(resolved: ResolvedConfig) -> None:
    """Check that everything needed to reach or start the servers is installed. Raises `ConfigError`."""
    config = resolved.config.actor_infer.strategy_args.strategy_config
    if config.server_python is not None and shutil.which(config.server_python) is None:
        key = f"{_KEY}.server_python"
        raise ConfigError("is no program", key=key, value=config.server_python, hint="…/bin/python")
    if not uses_external_engines(resolved):
        return
    if not config.in_process and find_spec("aiohttp") is None:
        key, value = (f"{_KEY}.url", list(config.url)) if config.url else (f"{_KEY}.launch", True)
        raise ConfigError("servers are reached with aiohttp", key=key, value=value, hint=suggest_install("serve"))
    _check_temperatures(resolved)
    if config.launch or config.in_process:
        key = f"{_KEY}.{'launch' if config.launch else 'in_process'}"
        _check_package(resolved.derived.strategies["actor_infer"], config.server_python, key)
    if config.in_process and resolved.config.processes is False:
        raise ConfigError("vLLM has a process of its own", key="processes", value=False, hint="leave it out")


def _check_temperatures(resolved: ResolvedConfig) -> None:
    if resolved.derived.strategies["actor_infer"] != "vllm":
        return
    config = resolved.config
    for role, sampling in (
        ("actor_infer", config.actor_infer.generating_args),
        ("validation", config.validation.generating_args),
    ):
        if (sampling.temperature or 0.0) > _MAX_VLLM_TEMPERATURE:
            raise ConfigError(
                f"vLLM refuses temperatures above {_MAX_VLLM_TEMPERATURE:g}",
                key=f"{role}.generating_args.temperature",
                value=sampling.temperature,
                hint="our own engine takes any: strategy_name: native",
            )


def _check_package(package: str, python: str | None, key: str) -> None:
    """Check that a package is installed in a supported version. Raises `ConfigError`."""
    version = find_server_package(package, python)
    if version is None:
        raise ConfigError(
            f"{package} is not installed for {python or sys.executable}",
            key=key,
            value=True,
            hint=f"server_python: the interpreter of an environment that has {package}; or url: a server that runs",
        )
    check_server_version(package, version)
    if python is not None and key.endswith("in_process"):
        version_ok = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
        if subprocess.run([python, "-c", version_ok], check=False, capture_output=True).returncode != 0:
            problem = f"Headway runs in it, and needs Python {'.'.join(map(str, OLDEST_PYTHON))}"
            raise ConfigError(problem, key=f"{_KEY}.server_python", value=python)


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


def make_visible_gpus_env(gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment of a child that sees these GPUs alone, which are numbered as this process sees them."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)}


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
