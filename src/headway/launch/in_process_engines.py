"""Make engines with vLLM in their own processes, without HTTP.

`create_in_process_engine` runs in a child, under an interpreter that has vLLM: everything that is imported here must be
there too. Weights come to the child as to any engine; vLLM's workers open the buffer in which they were verified.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.engines.vllm.worker_path.headway_worker import WeightReloadExtension
from headway.errors import EngineCrashed, HeadwayError
from headway.launch.inference_servers import ServerOptions, make_gpu_memory, make_gpu_share_env, make_server_launch
from headway.processes.base import ChildSpec
from headway.processes.child_process import ChildProcess, spawn_with_interpreter
from headway.weights.base import TensorEntry
from headway.weights.transports import TransportPlan, make_receiver_end

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.engines.vllm.vllm_core import AsyncLlmCore

_START_TIMEOUT_S = 600.0
_EXIT_DELAY_S = 0.2
"""Time between the end of vLLM and the end of its process, so that pending answers still reach the controller."""


def make_in_process_engines(servers: ServerOptions) -> list[Engine]:
    """Make one engine for each replica; nothing is started yet."""
    from headway.engines.remote_engine import RemoteEngine
    from headway.models.model_loading import find_end_tokens

    python = servers.resolved.config.actor_infer.strategy_args.strategy_config.server_python
    spawn = None if python is None else spawn_with_interpreter(python)
    start, ends = partial(ChildProcess.start, timeout_s=_START_TIMEOUT_S, spawn=spawn), find_end_tokens(servers.model)
    specs = [make_in_process_spec(servers, number, ends) for number in range(servers.replicas)]
    return [RemoteEngine(spec, servers.slots, start) for spec in specs]


def make_in_process_spec(servers: ServerOptions, number: int, ends: Iterable[int]) -> ChildSpec:
    """Describe engine `number` as a child; `ends` are the tokens that end an answer."""
    from headway.engines.servers.server_process import make_vllm_environment

    name, launch = f"engine/{number}", make_server_launch(servers)
    call_s = servers.resolved.config.reliability.abort_timeout_s
    return ChildSpec(
        name=name,
        target=f"{__name__}:create_in_process_engine",
        args={
            "name": name,
            "launch": {**asdict(launch), "extra": dict(launch.extra)},
            "ends": sorted(ends),
            "transport": servers.transport.to_json(),
            "device": servers.device,
            "deadlines": {"call_s": call_s, "load_s": servers.load_s},
        },
        threads=max(servers.threads, 1),
        env={
            **make_vllm_environment(launch),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            **make_gpu_share_env(servers, number),
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
        extension = f"{__name__}.{SharedVersionExtension.__name__}"
        launch, read_output = LaunchSettings(**args["launch"]), partial(_read_vllm_output, begin)
        return AsyncLlmCore(launch, extension, read_output, **args.get("deadlines", {}))
    except HeadwayError:
        raise
    except Exception as error:
        raise EngineCrashed(f"vLLM: {error}{_read_vllm_output(begin)}") from error


def make_in_process_engine(core: AsyncLlmCore, args: Mapping[str, Any]) -> Engine:
    """Make one replica over a running vLLM, without weights."""
    from headway.engines.servers.directory_receiver import check_tensor_names
    from headway.engines.servers.server_process import LaunchSettings
    from headway.engines.vllm.in_process_engine import InProcessEngine

    name, launch, device = args["name"], LaunchSettings(**args["launch"]), args["device"]
    transport = TransportPlan(**args["transport"])
    return InProcessEngine(
        name,
        core,
        slots=launch.slots,
        context_tokens=launch.context_tokens,
        memory=make_gpu_memory(device, transport),
        check=lambda manifest: check_tensor_names(manifest, Path(launch.model)),
        open_payload=make_receiver_end(transport, name, device).open_payload,
        end_tokens=args["ends"],
        decode=core.decode,
        on_down=exit_soon,
        drain_s=args["deadlines"]["call_s"],
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


class SharedVersionExtension(WeightReloadExtension):
    """Mixed into the workers of an in-process vLLM; loads versions from shared memory. vLLM calls its methods by name.

    The tensors are views of the buffer in which they were verified. vLLM copies what it needs of them: each worker its
    own part, where workers share a model.
    """

    def headway_take(
        self: Any, words: list[tuple[str, Any]], start: int, tensors: list[tuple[str, list[int], str]], label: str
    ) -> None:
        """Load a whole version from byte `start` of a buffer; `tensors` lie one after the other."""
        import torch

        from headway.weights.device_memory import make_shareable_memory
        from headway.weights.shared_version import view_tensors

        entries = [TensorEntry(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in tensors]
        handle = tuple(bytes.fromhex(word) if kind == "bytes" else word for kind, word in words)
        memory = make_shareable_memory(str(self.device) if len(handle) > 1 else "cpu")  # a segment has only a name
        buffer = memory.open(handle)
        self.reload_weights(weights_iterator=iter(view_tensors(entries, buffer, start).items()))
        self.headway_pack()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.headway_label(label)
