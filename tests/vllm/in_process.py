"""Engines with a real vLLM in their own processes, as a run makes them; processes stay while engines come and go.

A vLLM takes half a minute to come up, so that engines of many tests are made over the same one (`inside_target`). It is
started when it is first needed, and again when it has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.config import load_config
from headway.engines.base import Progress, Request
from headway.engines.remote_engine import RemoteEngine
from headway.launch.in_process_engines import make_in_process_spec
from headway.launch.inference_servers import ServerOptions
from headway.processes.base import ChildSpec
from headway.processes.child_process import (
    ChildProcess,
    make_package_directory,
    make_start_message,
    spawn_with_interpreter,
)
from headway.types import FinishReason
from headway.weights.weight_store import SharedArena, WeightStore
from tests.vllm.server_pool import BASE, DEVICE, PYTHON, SETTINGS, SIZE, SMALL, ServerPool, children

ROOT = Path(__file__).parents[2]


def servers(model: Path, logs: Path | None = None, **args: Any) -> ServerOptions:
    """What a run with `in_process: true` says about its engines."""
    words: dict[str, Any] = {
        "pretrain": str(model),
        "prompt_length": 56,
        "response_length": SIZE - 56,
        f"{BASE}.strategy_name": "vllm",
        f"{BASE}.strategy_config.in_process": True,
        f"{BASE}.strategy_config.server_python": PYTHON,
        f"{BASE}.strategy_config.server_args": {"enforce-eager": True, **args},
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
    )


async def start(spec: ChildSpec) -> ChildProcess:
    """As a run does."""
    return await ChildProcess.start(spec, 300.0, spawn=spawn_with_interpreter(PYTHON))


class BorrowedChild:
    """A `Peer` that only its killers end."""

    def __init__(self, child: ChildProcess) -> None:
        self.child = child

    @property
    def alive(self) -> bool:
        return self.child.alive

    def __getattr__(self, name: str) -> Any:
        return getattr(self.child, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "child":
            super().__setattr__(name, value)
        else:
            setattr(self.child, name, value)

    async def close(self, grace_s: float = 5.0) -> None:
        """Nothing, where it was not killed: `grace_s` is 0 then."""
        if not grace_s or not self.child.alive:
            await self.child.close(grace_s)


class WatchedRemoteEngine(RemoteEngine):
    """Knows what its newest request has made."""

    newest = Progress()

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        self.newest = progress
        return await super().generate(request, progress)

    async def made(self, count: int) -> None:
        """Until the newest request has `count` tokens."""
        while len(self.newest.actions) < count:  # noqa: ASYNC110 — nobody tells
            await asyncio.sleep(0.002)


class InProcessPool:
    """Children of one small model, and engines over them."""

    def __init__(self, place: ServerPool) -> None:
        self.place = place
        self.kept: dict[str, ChildProcess] = {}

    def engine(self, name: str = "engine/0", ends: tuple[int, ...] = ()) -> WatchedRemoteEngine:
        """Without weights, over the child of this name."""
        spec = make_in_process_spec(servers(self.place.model), 0, ends)
        changed = replace(
            spec,
            name=name,
            target="tests.vllm.in_process_target:engine",
            args={**spec.args, "name": name},
            env={**spec.env, "PYTHONPATH": os.pathsep.join((make_package_directory().name, str(ROOT)))},
            log=self.place.root / f"{name.replace('/', '-')}-inside.log",
        )
        engine = WatchedRemoteEngine(changed, SETTINGS.slots, self._lend)
        self.place.engines.append(engine)  # type: ignore[arg-type]
        return engine

    async def _lend(self, spec: ChildSpec) -> Any:
        child = self.kept.get(spec.name)
        if child is not None and child.alive:
            await child.call("start", make_start_message(spec))
        else:
            child = self.kept[spec.name] = await start(spec)
        return BorrowedChild(child)

    def kill(self, name: str) -> None:
        """vLLM's engine core, as the kernel does it when memory runs out."""
        (core,) = (pid for pid in children(self.kept[name].pid) if "EngineCore" in title(pid))
        os.kill(core, signal.SIGKILL)

    def close(self) -> None:
        async def all_of_them() -> None:
            for child in self.kept.values():
                await child.close()

        self.place.run(all_of_them())


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def publish(model: Any, version: int) -> WeightStore:
    """Put a version into shared memory."""
    store = WeightStore(bucket_mb=1.0, wire_dtype=None, arena=SharedArena())
    store.publish(version, dict(model.named_parameters()))
    return store


async def load(engine: RemoteEngine, store: WeightStore, version: int) -> None:
    """Bring a version to the engine, up to its flip."""
    manifest, buckets = await store.gather(version)
    await engine.receiver.begin(manifest)
    async for bucket in buckets:
        await engine.receiver.load(bucket)


async def serve(engine: RemoteEngine, model: Any, version: int) -> None:
    """Load and flip, through shared memory."""
    store = publish(model, version)
    try:
        await load(engine, store, version)
        await engine.receiver.flip()
    finally:
        store.close()


def shared_by(pids: list[int]) -> set[Path]:
    """Shared memory with a name that these processes have open; others on this machine have theirs."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[5]) for line in lines if "/dev/shm/psm_" in line}
    return found
