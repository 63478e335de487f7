"""Both ends of the way that weights take, and what is between them, for every `Way`.

    controller   make_transport(resolved, route)                                what carries buckets
    trainer      make_store(resolved, device, route), source_of(store, …)       where versions are published, given out
    engine       EngineEnd.of(route, name, device)                              how payloads are opened, what is kept

A late joiner needs nothing of its own here: whoever starts an engine has it sent the newest version by the same way.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.build.ways import Route
from headway.config import Resolved
from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from headway.weights.base import WeightReceiver, WeightSource, WeightTransport
    from headway.weights.store import WeightStore

Device = Literal["cpu", "cuda"]
_DELTA_BUCKET_MB = 16.0
"""One changed number sends its whole bucket."""
_ON_DISK = 3
"""Versions that stay: the newest, the one before it, and one for an engine that is slow to read."""
_BROADCAST_S = 60.0


def check_directory(route: Route, version_bytes: int) -> None:
    """That versions can be written where they go. Raises `ConfigError`."""
    if route.way != "disk":
        return
    path, key = Path(route.directory), "weight_transfer.directory"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            free = shutil.disk_usage(path).free
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key=key, value=str(path)) from error
    needed = _ON_DISK * version_bytes
    if free < needed:
        problem = f"has {free / 1e9:.2f} GB free, and {_ON_DISK} versions need about {needed / 1e9:.2f} GB"
        raise ConfigError(problem, key=key, value=str(path))


def make_transport(resolved: Resolved, route: Route) -> WeightTransport:
    """In the controller. Raises `ConfigError` when the address of a broadcast cannot be had."""
    from headway.weights.delta import DeltaTransport

    made = _transport(resolved, route)
    return DeltaTransport(made) if route.delta else made


def _transport(resolved: Resolved, route: Route) -> WeightTransport:
    from headway.weights.disk import DiskTransport
    from headway.weights.objects import ObjectTransport
    from headway.weights.transport import InProcessTransport, SharedMemoryTransport

    if route.way == "broadcast":
        return _broadcast(resolved, route.rendezvous)
    if route.way == "disk":
        return DiskTransport()
    if route.way == "shared_memory":
        return SharedMemoryTransport()
    if route.way == "object_store":
        return ObjectTransport()
    return InProcessTransport()  # what a bucket says is enough


def _broadcast(resolved: Resolved, rendezvous: str) -> WeightTransport:
    from headway.weights.broadcast import BroadcastTransport

    reliability = resolved.config.reliability
    bucket_s = reliability.transfer_timeout_s / (reliability.transfer_retries + 1)
    host, _, port = rendezvous.rpartition(":")
    try:
        return BroadcastTransport(host=host, port=int(port), timeout_s=min(_BROADCAST_S, bucket_s))
    except RuntimeError as error:
        problem = f"cannot be listened at: {str(error).splitlines()[0]}"
        raise ConfigError(problem, key="weight_transfer.address", value=rendezvous) from error


def make_store(resolved: Resolved, device: Device, route: Route) -> WeightStore:
    """In the trainer's process: where versions are published for engines in others."""
    return store_of(resolved, device, _arena(resolved, device, route))


def _arena(resolved: Resolved, device: Device, route: Route) -> Any:
    """Of the heap, shared memory, the object store (which a broadcast from another machine reads too), or a GPU."""
    from headway.weights.ipc import CudaMemory, IpcArena
    from headway.weights.objects import ObjectArena
    from headway.weights.store import SharedArena

    if route.way == "disk":
        return None
    if route.way == "cuda_ipc":
        return IpcArena(CudaMemory(device))
    return ObjectArena() if resolved.config.cluster.kind == "ray" else SharedArena()


def store_of(resolved: Resolved, device: Device, arena: Any) -> WeightStore:
    """Weights travel as engines compute with them: what is rounded away on the way makes the policy another one."""
    from headway.weights.store import WeightStore

    return WeightStore(bucket_mb=bucket_mb(resolved), wire=wire_of(resolved, device), arena=arena)


def wire_of(resolved: Resolved, device: Device) -> torch.dtype:
    """What floating tensors travel as."""
    import torch

    kind = resolved.config.actor_infer.model_args.dtype
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}["fp32" if device == "cpu" else kind]


def bucket_mb(resolved: Resolved) -> float:
    """Size of a bucket."""
    wanted, usual = resolved.config.weight_transfer, resolved.config.param_update_consume_bucket_mb
    return wanted.bucket_mb or (min(usual, _DELTA_BUCKET_MB) if wanted.delta else usual)


def source_of(source: WeightSource, resolved: Resolved, route: Route) -> WeightSource:
    """In the trainer's process: what gives versions out."""
    if route.way != "disk":
        return source

    from headway.weights.disk import DiskSource, VersionDirectory

    shard_mb = resolved.config.param_update_produce_bucket_mb
    return DiskSource(source, VersionDirectory(route.directory, keep=_ON_DISK, shard_mb=shard_mb))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """In the process of an engine, or of a scorer that follows the trainer."""

    read: Callable[[Any], Any]
    """Opens payloads."""
    keeps: bool = False
    """The bytes of what is served stay at hand, for buckets that did not change."""

    @classmethod
    def of(cls, route: Route, name: str, device: Device) -> EngineEnd:
        """What an engine called `name` needs; a scorer has no name, and reads what the trainer gave out."""
        return cls(read=_reader(route, name, device), keeps=route.delta)

    def around(self, receiver: WeightReceiver) -> WeightReceiver:
        """The engine's receiver, as others see it."""
        if not self.keeps:
            return receiver

        from headway.weights.delta import KeepingReceiver

        return KeepingReceiver(receiver, read=self.read)


def _reader(route: Route, name: str, device: Device) -> Callable[[Any], Any]:
    from headway.weights.segment import SharedReader

    if route.way == "broadcast" and name:
        from headway.weights.broadcast import Landing

        host, _, port = route.rendezvous.rpartition(":")
        return Landing(name, host, int(port)).buffer
    if route.way == "cuda_ipc":
        from headway.weights.ipc import CudaMemory, IpcReader

        return IpcReader(CudaMemory(device)).buffer
    return SharedReader().buffer
