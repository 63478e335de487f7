"""Engines that are vLLM or SGLang servers: by their addresses, or started for this run.

The adapter lives in the controller's process; weights come to it as to any engine and leave it as files. A server that
is started gets the GPUs of `actor_infer.device_mapping`, an equal share each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cluster.interpreter import OLDEST
from headway.config import Resolved
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.engines.servers.dialect import Dialect
    from headway.engines.servers.launch import Launch
    from headway.engines.servers.process import Server

_KEY = "actor_infer.strategy_args.strategy_config"
_THERE_S = 60.0
"""A server that runs already answers within this; one that is started has ten times as long."""
_HOTTEST = 2.0
"""Temperature."""
_BLOCK = 128
"""Tokens that a server on a CPU gives out together."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def serves(resolved: Resolved) -> bool:
    """Whether the engines of this run are somebody else's, in whatever process."""
    config = resolved.config.actor_infer.strategy_args.strategy_config
    return bool(config.url or config.launch or config.in_process)


def serves_inside(resolved: Resolved) -> bool:
    """Whether they run in engine processes of ours."""
    return resolved.config.actor_infer.strategy_args.strategy_config.in_process


def serves_by_url(resolved: Resolved) -> bool:
    """Whether they are somebody else's."""
    return bool(resolved.config.actor_infer.strategy_args.strategy_config.url)


def check_servers(resolved: Resolved) -> None:
    """That what is needed to reach or to start them is installed. Raises `ConfigError`."""
    config = resolved.config.actor_infer.strategy_args.strategy_config
    if not serves(resolved):
        return
    if not config.in_process and find_spec("aiohttp") is None:
        key, value = (f"{_KEY}.url", list(config.url)) if config.url else (f"{_KEY}.launch", True)
        raise ConfigError("servers are reached with aiohttp", key=key, value=value, hint="pip install 'headway[serve]'")
    _check_temperatures(resolved)
    if config.launch or config.in_process:
        key = f"{_KEY}.{'launch' if config.launch else 'in_process'}"
        _check_package(resolved.derived.strategies["actor_infer"], config.server_python, key)
    if config.in_process and resolved.config.processes is False:
        raise ConfigError("vLLM has a process of its own", key="processes", value=False, hint="leave it out")


def _check_temperatures(resolved: Resolved) -> None:
    config = resolved.config
    for role, sampling in (
        ("actor_infer", config.actor_infer.generating_args),
        ("validation", config.validation.generating_args),
    ):
        if resolved.derived.strategies["actor_infer"] == "vllm" and (sampling.temperature or 0.0) > _HOTTEST:
            raise ConfigError(
                f"vLLM refuses temperatures above {_HOTTEST:g}",
                key=f"{role}.generating_args.temperature",
                value=sampling.temperature,
                hint="our own engine takes any: strategy_name: native",
            )


def _check_package(package: str, python: str | None, key: str) -> None:
    if python is not None:
        if shutil.which(python) is None:
            raise ConfigError("is no program", key=f"{_KEY}.server_python", value=python, hint="…/bin/python")
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        there = _exit_code(python, code) == 0
        oldest = ".".join(map(str, OLDEST))
        if key.endswith("in_process") and _exit_code(python, f"import sys; sys.exit(sys.version_info < {OLDEST})"):
            raise ConfigError(
                f"Headway runs in it, and needs Python {oldest}", key=f"{_KEY}.server_python", value=python
            )
    else:
        there = find_spec(package) is not None
    if not there:
        raise ConfigError(
            f"{package} is not installed for {python or sys.executable}",
            key=key,
            value=True,
            hint=f"server_python: the interpreter of an environment that has {package}; or url: a server that runs",
        )


def _exit_code(python: str, code: str) -> int:
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What all of them have in common."""

    resolved: Resolved
    model: Path
    device: str
    replicas: int
    slots: int
    """Requests that each works on together."""
    threads: int = 0
    """Of the CPU, for each that is started there; 0: it decides."""
    logs: Path | None = None


def make_servers(servers: Servers) -> list[Engine]:
    """An engine for each address, or for each replica."""
    from headway.engines.servers.engine import ServerEngine
    from headway.engines.servers.settings import ServerSettings
    from headway.models import end_tokens, load_tokenizer
    from headway.weights.segment import SharedReader

    resolved, model, logs = servers.resolved, servers.model, servers.logs
    reliability, tokenizer = resolved.config.reliability, load_tokenizer(model)
    settings = ServerSettings(
        slots=servers.slots,
        context_tokens=resolved.derived.sequence_length,
        call_s=reliability.abort_timeout_s,
        load_s=reliability.transfer_timeout_s,
        first_s=min(_THERE_S, reliability.transfer_timeout_s) if serves_by_url(resolved) else 10 * _THERE_S,
        start_s=reliability.transfer_timeout_s,
        drain_s=reliability.abort_timeout_s / 2,
    )
    room = logs.parent / "served" if logs is not None else Path(tempfile.mkdtemp(prefix="headway-"))
    engines: list[Engine] = []
    for number in range(servers.replicas):
        name, dialect = f"engine/{number}", _dialect(resolved)
        engines.append(
            ServerEngine(
                name,
                _server(servers, dialect, number),
                dialect,
                settings,
                root=room / name.replace("/", "-"),
                ends=end_tokens(model),
                decode=tokenizer.decode,
                beside=model,
                read=SharedReader().buffer,
            )
        )
    return engines


def _dialect(resolved: Resolved) -> Dialect:
    from headway.engines.servers.sglang import Sglang
    from headway.engines.servers.vllm import Vllm

    ours = resolved.config.actor_infer.strategy_args.strategy_config.launch
    return Vllm(ours=ours) if resolved.derived.strategies["actor_infer"] == "vllm" else Sglang()


def _server(servers: Servers, dialect: Dialect, number: int) -> Server:
    from headway.engines.servers.process import ExternalServer, OwnedServer

    config, logs = servers.resolved.config.actor_infer.strategy_args.strategy_config, servers.logs
    if config.url:
        return ExternalServer(config.url[number])
    return OwnedServer(
        f"engine/{number}",
        partial(command, servers, dialect, number),
        log=None if logs is None else logs / f"engine-{number}-server.log",
    )


def command(servers: Servers, dialect: Dialect, number: int, port: int) -> tuple[list[str], Mapping[str, str]]:
    """How server `number` is started, and what is added to its environment."""
    config = servers.resolved.config.actor_infer.strategy_args.strategy_config
    (_, *line), environment = dialect.command(launch_of(servers, port))
    return [config.server_python or sys.executable, *line], {**environment, **cards_of(servers, number)}


def launch_of(servers: Servers, port: int = 0) -> Launch:
    """What each of them is started with."""
    from headway.engines.servers.launch import Launch

    resolved, infer = servers.resolved, servers.resolved.config.actor_infer
    config, on_cpu = infer.strategy_args.strategy_config, servers.device == "cpu"
    tokens = resolved.derived.sequence_length
    return Launch(
        model=str(servers.model),
        port=port,
        slots=servers.slots,
        context_tokens=tokens,
        dtype="float32" if on_cpu else _DTYPES[infer.model_args.dtype],
        tensor_parallel=config.tensor_model_parallel_size,
        memory_share=config.gpu_memory_utilization,
        cache_bytes=cache_bytes(servers.model, servers.slots, tokens) if on_cpu else 0,
        threads=servers.threads if on_cpu else 0,
        seed=resolved.config.seed,
        extra=config.server_args,
    )


def cache_bytes(model: Path, slots: int, context_tokens: int) -> int:
    """KV of `slots` full contexts in float32, and as much again for prefixes; 0 where the model does not say.

    On a CPU a share of the device is a share of the machine, which trainer and engine have together.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        a_token = 2 * 4 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
        return int(a_token * _BLOCK * 2 * (slots * -(-context_tokens // _BLOCK) + 1))
    return 0


def cards_of(servers: Servers, number: int) -> dict[str, str]:
    """The GPUs that a server sees; all of them where none are mapped."""
    resolved = servers.resolved
    if servers.device == "cpu" or resolved.config.actor_infer.device_mapping is None:
        return {}
    devices = resolved.derived.devices["actor_infer"]
    share = len(devices) // servers.replicas
    ours = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    mine = devices[number * share : (number + 1) * share]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ours[card] if ours else str(card) for card in mine)}
