"""How a server is used, with what it is started, and where it comes from: an address, or a program launched here.

A launched server ends with this process, however that ended, and writes its output to a log file. When it ends by
itself, its engine is told at once, with the first errors and the last lines of the output. Does not know whether a
server that runs also answers.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headway.errors import EngineCrashed
from headway.processes.child_process import WatchedProgram, describe_exit
from headway.processes.process_output import open_output_file, read_errors_and_last_lines


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
    """Limit of each phase of loading a version."""
    first_s: float = 600.0
    """Limit of the first answer of a server at the start of a run."""
    start_s: float = 600.0
    """Limit of the first answer of a server that was restarted."""
    silence_s: float = 300.0
    """A server that brings nothing for a request in this time hangs."""
    drain_s: float = 5.0
    """Limit of the wait for the last tokens of requests that were ended."""
    sleeps: bool = False
    """Whether the server was started so that it can free its memory."""


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
    shares_memory: bool = False
    """Whether weights come in memory of its GPU that it opens by a handle."""
    sleeps: bool = False
    """Whether it frees the memory of its GPU while the trainer has its turn."""
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
        "enable_sleep_mode": launch.sleeps or None,
    }


def make_vllm_environment(launch: LaunchSettings) -> dict[str, str]:
    """Return environment variables that limit vLLM to its threads; by itself it takes all cores but one."""
    threads = {"OMP_NUM_THREADS": str(launch.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    limits = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **threads} if launch.threads else {}
    return {"VLLM_NO_USAGE_STATS": "1", **limits}


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


ServerCommand = Callable[[int], tuple[list[str], Mapping[str, str]]]
"""Makes a command line and additions to the environment from a port."""
ReportEnd = Callable[[str], object]
"""Is called with how a server ended, when it did so by itself."""


class ServerHandle:
    """A server at an address. This one is external: it runs already, and is never started or ended here."""

    def __init__(self, url: str) -> None:
        self.url = url
        """Its address. Another one after `start`."""
        self.ended = ""
        """How it ended by itself; empty: it has not, as far as is known."""

    async def wait_for_end(self, timeout_s: float) -> str:
        """Return how it ended, as soon as that is known; empty where it has not after `timeout_s`."""
        return ""

    async def start(self, on_end: ReportEnd) -> None:
        """Start it, or start it again. Does not wait until it answers."""

    async def close(self) -> None:
        """End it, if it was launched here. Idempotent."""


class LaunchedServer(ServerHandle):
    """A program on a free port of this machine. Its output is appended to `log`."""

    def __init__(self, name: str, command: ServerCommand, *, log: Path | None = None, grace_s: float = 5.0) -> None:
        super().__init__("")
        self.name = name
        self.pid = 0
        """Process of the watchdog between us and the server."""
        self._command = command
        self._log = log
        self._grace_s = grace_s
        self._program: WatchedProgram | None = None
        self._output: IO[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def wait_for_end(self, timeout_s: float) -> str:
        if self._watch is not None:
            await asyncio.wait([self._watch], timeout=timeout_s)
        return self.ended

    async def start(self, on_end: ReportEnd) -> None:
        await self.close()
        port = _find_free_port()
        command, environment = self._command(port)
        output = self._output = open_output_file(self._log)
        begin = os.fstat(output.fileno()).st_size
        try:
            program = await WatchedProgram.start(
                command, env={"PYTHONUNBUFFERED": "1", **environment}, output=output.fileno(), grace_s=self._grace_s / 2
            )
        except OSError as error:
            raise EngineCrashed(f"{self.name} cannot be started: {error}") from error
        self.url, self.ended, self.pid, self._program = f"http://127.0.0.1:{port}", "", program.pid, program
        self._watch = asyncio.create_task(
            self._watch_program(program, output, begin, on_end), name=f"{self.name}/server"
        )

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if self._program is not None:
            self._program.end()
        if watch is not None:
            await asyncio.shield(watch)
        output, self._output = self._output, None
        if output is not None:
            output.close()

    async def _watch_program(self, program: WatchedProgram, output: IO[bytes], begin: int, on_end: ReportEnd) -> None:
        code = await program.wait()
        if not program.ending:
            self.ended = f"{self.name}: its server {describe_exit(code)}{read_errors_and_last_lines(output, begin)}"
            on_end(self.ended)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
