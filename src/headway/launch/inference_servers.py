"""Make engines of vLLM and SGLang: servers at given addresses, servers started for this run, or vLLM in a child.

The adapter of a server lives in the controller's process; weights come to it as to any engine and leave it as files.
With `in_process: true` vLLM runs inside an engine process of this run, under an interpreter that has it, and takes
weights like any other engine. `create_in_process_engine` runs in that child, so everything it imports must be there
under vLLM's interpreter too. Servers and children get equal shares of the GPUs of `actor_infer.device_mapping`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.config import ResolvedConfig
from headway.engines.vllm.worker_path.headway_worker import WeightReloadExtension
from headway.errors import ConfigError, EngineCrashed, HeadwayError
from headway.extras import suggest_install
from headway.launch.transports import TransportPlan, make_receiver_end
from headway.processes.base import ChildSpec
from headway.processes.child_process import OLDEST_PYTHON, ChildProcess, spawn_with_interpreter
from headway.weights.base import TensorEntry
from headway.weights.shared_memory import SharedSegment

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.engines.servers.server_dialect import ServerDialect
    from headway.engines.servers.server_process import LaunchSettings, ServerHandle
    from headway.engines.vllm.vllm_core import AsyncLlmCore

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
_START_TIMEOUT_S = 600.0
_EXIT_DELAY_S = 0.2
"""Time between the end of vLLM and the end of its process, so that pending answers still reach the controller."""


def uses_external_engines(resolved: ResolvedConfig) -> bool:
    """Return whether the engines of this run are vLLM or SGLang, in whatever process."""
    config = resolved.config.actor_infer.strategy_args.strategy_config
    return bool(config.url or config.launch or config.in_process)


def uses_in_process_vllm(resolved: ResolvedConfig) -> bool:
    """Return whether vLLM runs inside engine processes of this run."""
    return resolved.config.actor_infer.strategy_args.strategy_config.in_process


def check_server_requirements(resolved: ResolvedConfig) -> None:
    """Check that everything needed to reach or start the servers is installed. Raises `ConfigError`."""
    config = resolved.config.actor_infer.strategy_args.strategy_config
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
    if python is None:
        installed = find_spec(package) is not None
    else:
        if shutil.which(python) is None:
            raise ConfigError("is no program", key=f"{_KEY}.server_python", value=python, hint="…/bin/python")
        installed = _run_python(python, f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)")
        version_ok = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
        if key.endswith("in_process") and not _run_python(python, version_ok):
            problem = f"Headway runs in it, and needs Python {'.'.join(map(str, OLDEST_PYTHON))}"
            raise ConfigError(problem, key=f"{_KEY}.server_python", value=python)
    if not installed:
        raise ConfigError(
            f"{package} is not installed for {python or sys.executable}",
            key=key,
            value=True,
            hint=f"server_python: the interpreter of an environment that has {package}; or url: a server that runs",
        )


def _run_python(python: str, code: str) -> bool:
    """Run `code` in another interpreter; return whether it exited with 0."""
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What all servers, or all vLLM children, of a run have in common."""

    resolved: ResolvedConfig
    model: Path
    device: str
    replicas: int
    slots: int
    """Requests that each of them decodes together."""
    threads: int = 0
    """CPU threads of each that is started; 0: it decides itself."""
    cards: Sequence[Sequence[int]] = ()
    """GPUs of each; empty: as `actor_infer.device_mapping` says, or all of them."""
    logs: Path | None = None


def make_server_engines(servers: ServerOptions) -> list[Engine]:
    """Make one engine for each address, or for each replica that is to be started."""
    from headway.engines.servers.server_engine import ServerEngine
    from headway.engines.servers.server_process import ServerSettings
    from headway.models.model_loading import find_end_tokens, load_tokenizer
    from headway.weights.shared_memory import PayloadReader

    resolved, model, logs = servers.resolved, servers.model, servers.logs
    reliability, tokenizer = resolved.config.reliability, load_tokenizer(model)
    by_url = bool(resolved.config.actor_infer.strategy_args.strategy_config.url)
    settings = ServerSettings(
        slots=servers.slots,
        context_tokens=resolved.derived.sequence_length,
        call_s=reliability.abort_timeout_s,
        load_s=reliability.transfer_timeout_s,
        first_s=min(_FIRST_REPLY_S, reliability.transfer_timeout_s) if by_url else 10 * _FIRST_REPLY_S,
        start_s=reliability.transfer_timeout_s,
        drain_s=reliability.abort_timeout_s / 2,
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
                open_payload=PayloadReader().open,
            )
        )
    return engines


def _make_dialect(resolved: ResolvedConfig) -> ServerDialect:
    from headway.engines.servers.sglang_dialect import SglangDialect
    from headway.engines.servers.vllm_dialect import VllmDialect

    launched = resolved.config.actor_infer.strategy_args.strategy_config.launch
    return VllmDialect(launched=launched) if resolved.derived.strategies["actor_infer"] == "vllm" else SglangDialect()


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
    return [config.server_python or sys.executable, *arguments], {**environment, **_make_gpu_share_env(servers, number)}


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
        cache_bytes=estimate_kv_cache_bytes(servers.model, servers.slots, tokens) if on_cpu else 0,
        threads=servers.threads if on_cpu else 0,
        seed=resolved.config.seed,
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


def make_visible_gpus_env(gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment of a child that sees these GPUs alone, which are numbered as this process sees them."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)}


def _make_gpu_share_env(servers: ServerOptions, number: int) -> dict[str, str]:
    """Return the environment in which server `number` sees its share of the GPUs; all of them where none are mapped."""
    resolved = servers.resolved
    if servers.cards:
        return make_visible_gpus_env(servers.cards[number])
    if servers.device == "cpu" or resolved.config.actor_infer.device_mapping is None:
        return {}
    devices = resolved.derived.devices["actor_infer"]
    share = len(devices) // servers.replicas
    return make_visible_gpus_env(devices[number * share : (number + 1) * share])


# -- vLLM inside an engine process


def make_in_process_engines(servers: ServerOptions, transport: TransportPlan) -> list[Engine]:
    """Make one engine for each replica; nothing is started yet."""
    from headway.engines.remote_engine import RemoteEngine
    from headway.models.model_loading import find_end_tokens

    python = servers.resolved.config.actor_infer.strategy_args.strategy_config.server_python
    spawn = None if python is None else spawn_with_interpreter(python)
    start, ends = partial(ChildProcess.start, timeout_s=_START_TIMEOUT_S, spawn=spawn), find_end_tokens(servers.model)
    specs = [make_in_process_spec(servers, transport, number, ends) for number in range(servers.replicas)]
    return [RemoteEngine(spec, servers.slots, start) for spec in specs]


def make_in_process_spec(
    servers: ServerOptions, transport: TransportPlan, number: int, ends: Iterable[int]
) -> ChildSpec:
    """Describe engine `number` as a child; `ends` are the tokens that end an answer."""
    from headway.engines.servers.server_process import make_vllm_environment

    name, launch = f"engine/{number}", make_server_launch(servers)
    return ChildSpec(
        name=name,
        target=f"{__name__}:create_in_process_engine",
        args={
            "name": name,
            "launch": {**asdict(launch), "extra": dict(launch.extra)},
            "ends": sorted(ends),
            "transport": transport.to_json(),
        },
        threads=max(servers.threads, 1),
        env={
            **make_vllm_environment(launch),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            **_make_gpu_share_env(servers, number),
        },
        log=None if servers.logs is None else servers.logs / f"engine-{number}.log",
    )


async def create_in_process_engine(args: Mapping[str, Any]) -> Engine:
    """Start vLLM in this child process. Raises `EngineCrashed` with the output of a vLLM that does not come up."""
    from headway.processes.parent_watchdog import tie_process_group_to_parent

    tie_process_group_to_parent()
    return make_in_process_engine(make_llm(args), args)


def make_llm(args: Mapping[str, Any]) -> AsyncLlmCore:
    """Start vLLM; this blocks the event loop until vLLM is up."""
    from headway.engines.servers.server_process import LaunchSettings
    from headway.engines.vllm.vllm_core import AsyncLlmCore

    begin = os.fstat(sys.stdout.fileno()).st_size
    try:
        extension = f"{__name__}.{SharedBufferReloadExtension.__name__}"
        return AsyncLlmCore(LaunchSettings(**args["launch"]), extension, partial(_read_vllm_output, begin))
    except HeadwayError:
        raise
    except Exception as error:
        raise EngineCrashed(f"vLLM: {error}{_read_vllm_output(begin)}") from error


def make_in_process_engine(core: AsyncLlmCore, args: Mapping[str, Any]) -> Engine:
    """Make one replica over a running vLLM, without weights."""
    from headway.engines.servers.directory_receiver import check_tensor_names
    from headway.engines.servers.server_process import LaunchSettings
    from headway.engines.vllm.in_process_engine import InProcessEngine

    name, launch = args["name"], LaunchSettings(**args["launch"])
    return InProcessEngine(
        name,
        core,
        slots=launch.slots,
        context_tokens=launch.context_tokens,
        make_buffer=SharedSegment.create,
        check=lambda manifest: check_tensor_names(manifest, Path(launch.model)),
        open_payload=make_receiver_end(TransportPlan(**args["transport"]), name, "cpu").open_payload,
        end_tokens=args["ends"],
        decode=core.decode,
        on_down=exit_soon,
    )


def _read_vllm_output(begin: int) -> str:
    """Return what vLLM has written to our standard output since position `begin`."""
    from headway.processes.process_output import read_errors_and_last_lines

    sys.stdout.flush()
    with os.fdopen(os.dup(sys.stdout.fileno()), "rb", buffering=0) as output:
        return read_errors_and_last_lines(output, begin)


def exit_soon(why: str) -> None:
    """End this process, which is useless without vLLM; the controller notices that at once and restarts it."""
    print(why, file=sys.stderr, flush=True)
    asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, 1)


class SharedBufferReloadExtension(WeightReloadExtension):
    """Mixed into the workers of an in-process vLLM; loads versions from shared memory. vLLM calls its methods by name.

    The tensors are views of the segment in which they were verified. vLLM copies what it needs of them: each worker its
    own part, where workers share a model.
    """

    def headway_take(self: Any, segment: str, tensors: list[tuple[str, list[int], str]]) -> None:
        """Load a whole version: `tensors` lie in `segment` one after the other, each a name, a shape and a type."""
        from headway.weights.weight_layout import compute_layout, unpack_tensors

        entries = [TensorEntry(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in tensors]
        shared = SharedSegment.attach(segment)
        try:
            weights = unpack_tensors(shared.buffer, compute_layout(entries)[0])
            self.reload_weights(weights_iterator=iter(weights.items()))
            self.headway_pack()
        finally:
            shared.close()
