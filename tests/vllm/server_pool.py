"""Real servers of vLLM, started as a run starts them and kept while engines come and go.

With `HEADWAY_SERVER=sglang` they are SGLang's: the contracts and what tokens must be are the same.

A server takes half a minute to come up, so that engines of many tests are made over the same one; it is started when
it is first needed, and again when it has ended. Everything here runs on one event loop, which is the servers' too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.engines.base import Progress, Request
from headway.engines.servers.server_dialect import ServerDialect
from headway.engines.servers.server_engine import ServerEngine
from headway.engines.servers.server_process import LaunchedServer, ReportEnd, ServerSettings
from headway.engines.servers.sglang_dialect import SglangDialect
from headway.engines.servers.vllm_dialect import VllmDialect
from headway.launch.inference_servers import ServerOptions, make_server_command
from headway.models.tiny_model import make_character_tokenizer
from headway.types import FinishReason
from headway.weights.device_memory import make_shareable_memory
from headway.weights.transports import TransportPlan
from tests.engines.factory import counting_model, make_model

PYTHON = os.environ["HEADWAY_VLLM"]
"""Interpreter of an environment that has vLLM or SGLang."""
SERVER = os.environ.get("HEADWAY_SERVER", "vllm")
DEVICE: Any = os.environ.get("HEADWAY_VLLM_DEVICE", "cpu")
"""With `cuda` the same tests run on a GPU, and weights reach the servers by CUDA IPC."""
SERVER_ARGS: dict[str, Any] = {
    "vllm": {"enforce-eager": True},
    "sglang": {
        "disable-cuda-graph": True,
        "attention-backend": "triton" if DEVICE == "cuda" else "torch_native",
        "sampling-backend": "pytorch",
        "max-total-tokens": 32768,
        "device": DEVICE,
    },
}[SERVER]
SIZE = 2048
"""Tokens that the models know, and that a context has: requests can be so long that there is time to disturb them."""
DISTURBED_TOKENS = 1600 if SERVER == "vllm" or DEVICE == "cuda" else 120
"""Tokens of a request that a test disturbs: seconds of decoding on a machine that does nothing else."""
SHAPE: dict[str, Any] = {
    "hidden_size": SIZE,
    "vocab_size": SIZE,
    "num_hidden_layers": 1,
    "head_dim": 128,
    "max_position_embeddings": SIZE,
}
SETTINGS = ServerSettings(slots=8, context_tokens=SIZE, drain_s=5.0)
BASE = "actor_infer.strategy_args"
SHARE = 0.05 if SERVER == "vllm" else 0.5
DTYPE = "fp32" if DEVICE == "cpu" else "bf16"
exact = pytest.mark.skipif(
    DTYPE != "fp32", reason="compares with float32; benchmarks/one_server.py has figures of bf16"
)
SMALL = {f"{BASE}.strategy_config.gpu_memory_utilization": SHARE, "actor_infer.model_args.dtype": DTYPE}
"""Several of them are on one GPU."""


class SharedServer:
    """A `ServerHandle` that engines share, one after the other: none of them ends it."""

    def __init__(self, owned: LaunchedServer) -> None:
        self.owned = owned
        self._on_end: ReportEnd = lambda how: None

    @property
    def url(self) -> str:
        return self.owned.url

    @property
    def ended(self) -> str:
        return self.owned.ended

    async def wait_for_end(self, timeout_s: float) -> str:
        return await self.owned.wait_for_end(timeout_s)

    async def start(self, on_end: ReportEnd) -> None:
        self._on_end = on_end
        if not self.owned.url or self.owned.ended:
            await self.owned.start(lambda how: self._on_end(how))

    async def close(self) -> None:
        self._on_end = lambda how: None


class WatchedServerEngine(ServerEngine):
    """Knows what its newest request has made."""

    newest = Progress()

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        self.newest = progress
        return await super().generate(request, progress)

    async def made(self, count: int) -> None:
        """Until the newest request has `count` tokens."""
        while len(self.newest.actions) < count:  # noqa: ASYNC110 — nobody tells
            await asyncio.sleep(0.002)


def save(model: Any, directory: Path) -> Path:
    """With a tokenizer, as servers want it. Its words are those of another vocabulary: nothing here reads them."""
    model.save_pretrained(directory)
    make_character_tokenizer().save_pretrained(directory)
    return directory


def servers(model: Path, logs: Path | None = None, **args: Any) -> ServerOptions:
    """What a run with `launch: true` says about its servers."""
    words: dict[str, Any] = {
        "pretrain": str(model),
        "prompt_length": 56,
        "response_length": SIZE - 56,
        f"{BASE}.strategy_name": SERVER,
        f"{BASE}.strategy_config.launch": True,
        f"{BASE}.strategy_config.server_python": PYTHON,
        f"{BASE}.strategy_config.server_args": {**SERVER_ARGS, **args},
        **SMALL,
    }
    return ServerOptions(
        resolved=load_config(None, words),
        model=model,
        device=DEVICE,
        cache_bytes=1 << 30,
        replicas=1,
        slots=SETTINGS.slots,
        threads=2,
        logs=logs,
        transport=TransportPlan(kind="shared_memory" if DEVICE == "cpu" else "cuda_ipc"),
    )


def owned(name: str, model: Path, log: Path | None = None, **args: Any) -> LaunchedServer:
    """A server of our own, not yet started."""
    return LaunchedServer(name, partial(make_server_command, servers(model, **args), make_dialect(), 0), log=log)


def make_dialect() -> ServerDialect:
    return VllmDialect(launched=True) if SERVER == "vllm" else SglangDialect()


class ServerPool:
    """Servers of one small model, and engines over them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.counting = counting_model(**SHAPE)
        self.random = make_model(**SHAPE)
        self.model = save(self.counting, root / "model")
        self.kept: dict[str, SharedServer] = {}
        self.engines: list[WatchedServerEngine] = []
        self._runner = asyncio.Runner()

    def run(self, scenario: Coroutine[Any, Any, None], timeout_s: float = 400.0) -> None:
        """Never forever; the engines that it has made are gone afterwards, their servers are not."""

        async def whole() -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await scenario
            finally:
                for engine in self.engines:
                    await engine.close()
                self.engines = []

        self._runner.run(whole())

    def engine(self, name: str = "engine/0", **options: Any) -> WatchedServerEngine:
        """Without weights, over the server of this name."""
        if name not in self.kept:
            log = self.root / f"{name.replace('/', '-')}.log"
            self.kept[name] = SharedServer(owned(name, self.model, log))
        chosen: dict[str, Any] = {
            "root": self.root / "served" / name,
            "model_directory": self.model,
            "end_tokens": [],
            "memory": None if DEVICE == "cpu" else make_shareable_memory(DEVICE),
            **options,
        }
        engine = WatchedServerEngine(name, self.kept[name], make_dialect(), SETTINGS, **chosen)
        self.engines.append(engine)
        return engine

    def kill(self, name: str) -> None:
        """The server, as the kernel does it when memory runs out."""
        (server,) = children(self.kept[name].owned.pid)
        os.kill(server, signal.SIGKILL)

    def close(self) -> None:
        async def all_of_them() -> None:
            for kept in self.kept.values():
                await kept.owned.close()

        self._runner.run(all_of_them())
        self._runner.close()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def family(pid: int) -> list[int]:
    """It, its children and theirs."""
    return [pid, *(one for child in children(pid) for one in family(child))]


def gone(pids: list[int], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
