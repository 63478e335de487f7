"""Which way weights take from the trainer into the engines of a run: chosen once, from plain facts.

`select_transport_kind` is the choice. Whatever else depends on it (where versions are published, what engines are told, how much
memory that takes) follows from the `TransportPlan`, which travels to every part as JSON.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.config import ResolvedConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from headway.weights.base import WeightReceiver, WeightSource, WeightTransport
    from headway.weights.weight_store import WeightStore


TransportKind = Literal["in_process", "shared_memory", "disk", "broadcast", "cuda_ipc", "object_store"]
_KEY = "weight_transfer.transport"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPlan:
    """The way, and what both ends have to know of it."""

    way: TransportKind = "in_process"
    delta: bool = False
    """Buckets that did not change are left out."""
    rendezvous: str = ""
    """`host:port` where a broadcast is to be found."""
    directory: str = ""
    """Where versions are written."""

    def to_json(self) -> dict[str, Any]:
        """For a child process; `TransportPlan(**…)` there."""
        return asdict(self)


def select_transport_kind(resolved: ResolvedConfig, *, device: str, processes: bool) -> TransportKind:
    """What the configuration asks for, or what suits the placement. Raises `ConfigError`."""
    wanted = resolved.config.weight_transfer
    if not processes:
        if wanted.transport != "auto" or wanted.delta:
            key, value = (_KEY, wanted.transport) if wanted.transport != "auto" else ("weight_transfer.delta", True)
            problem = "trainer and engines are threads of one process here, and weights are handed over"
            raise ConfigError(problem, key=key, value=value, hint="processes: true")
        return "in_process"
    if wanted.transport == "cuda_ipc" and device != "cuda":
        raise ConfigError("needs a GPU", key=_KEY, value=wanted.transport, hint="shared_memory")
    if wanted.transport != "auto":
        return wanted.transport
    return "object_store" if resolved.config.cluster.kind == "ray" else "shared_memory"


def plan_transport(resolved: ResolvedConfig, *, device: str, processes: bool) -> TransportPlan:
    """The way with its particulars. Raises `ConfigError`."""
    way, wanted = select_transport_kind(resolved, device=device, processes=processes), resolved.config.weight_transfer
    return TransportPlan(
        way=way,
        delta=wanted.delta,
        rendezvous=_choose_rendezvous(resolved) if way == "broadcast" else "",
        directory=_find_version_directory(resolved) if way == "disk" else "",
    )


def plan_transport_without_trainer(route: TransportPlan, *, clustered: bool) -> TransportPlan:
    """For engines that are given their weights once, by the process that asks them."""
    if route.way == "in_process":
        return route
    return TransportPlan(way="object_store" if clustered else "shared_memory")


def _find_version_directory(resolved: ResolvedConfig) -> str:
    given = resolved.config.weight_transfer.directory
    path = Path(given).expanduser() if given else Path(resolved.config.output_dir) / "weights"
    return str(path.absolute())


def _choose_rendezvous(resolved: ResolvedConfig) -> str:
    given, key = resolved.config.weight_transfer.address, "weight_transfer.address"
    if given is None and resolved.config.cluster.kind == "ray":
        raise ConfigError("where do engines on other machines reach this one?", key=key, value=None, hint="10.0.0.1")
    host, colon, port = (given or _LOOPBACK).rpartition(":")
    if not colon:
        return f"{port}:{_find_free_port()}"
    if not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError("is no address", key=key, value=given, hint="host, or host:port")
    return f"{host}:{port}"


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


Device = Literal["cpu", "cuda"]
_DELTA_BUCKET_MB = 16.0
"""One changed number sends its whole bucket."""
_VERSIONS_ON_DISK = 3
"""Versions that stay: the newest, the one before it, and one for an engine that is slow to read."""
_BROADCAST_TIMEOUT_S = 60.0


def check_version_directory(route: TransportPlan, version_bytes: int) -> None:
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
    needed = _VERSIONS_ON_DISK * version_bytes
    if free < needed:
        problem = f"has {free / 1e9:.2f} GB free, and {_VERSIONS_ON_DISK} versions need about {needed / 1e9:.2f} GB"
        raise ConfigError(problem, key=key, value=str(path))


def make_transport(resolved: ResolvedConfig, route: TransportPlan) -> WeightTransport:
    """In the controller. Raises `ConfigError` when the address of a broadcast cannot be had."""
    from headway.weights.delta_transport import DeltaTransport

    made = _make_plain_transport(resolved, route)
    return DeltaTransport(made) if route.delta else made


def _make_plain_transport(resolved: ResolvedConfig, route: TransportPlan) -> WeightTransport:
    from headway.weights.disk_transport import DiskTransport
    from headway.weights.object_store import ObjectTransport
    from headway.weights.shared_memory import InProcessTransport, SharedMemoryTransport

    if route.way == "broadcast":
        return _make_broadcast_transport(resolved, route.rendezvous)
    if route.way == "disk":
        return DiskTransport()
    if route.way == "shared_memory":
        return SharedMemoryTransport()
    if route.way == "object_store":
        return ObjectTransport()
    return InProcessTransport()  # what a bucket says is enough


def _make_broadcast_transport(resolved: ResolvedConfig, rendezvous: str) -> WeightTransport:
    from headway.weights.broadcast_transport import BroadcastTransport

    reliability = resolved.config.reliability
    bucket_s = reliability.transfer_timeout_s / (reliability.transfer_retries + 1)
    host, _, port = rendezvous.rpartition(":")
    try:
        return BroadcastTransport(host=host, port=int(port), timeout_s=min(_BROADCAST_TIMEOUT_S, bucket_s))
    except RuntimeError as error:
        problem = f"cannot be listened at: {str(error).splitlines()[0]}"
        raise ConfigError(problem, key="weight_transfer.address", value=rendezvous) from error


def make_published_store(resolved: ResolvedConfig, device: Device, route: TransportPlan) -> WeightStore:
    """In the trainer's process: where versions are published for engines in others."""
    return make_weight_store(resolved, device, _make_arena(resolved, device, route))


def _make_arena(resolved: ResolvedConfig, device: Device, route: TransportPlan) -> Any:
    """Of the heap, shared memory, the object store (which a broadcast from another machine reads too), or a GPU."""
    from headway.weights.device_memory import CudaMemory, IpcArena
    from headway.weights.object_store import ObjectArena
    from headway.weights.weight_store import SharedArena

    if route.way == "disk":
        return None
    if route.way == "cuda_ipc":
        return IpcArena(CudaMemory(device))
    return ObjectArena() if resolved.config.cluster.kind == "ray" else SharedArena()


def make_weight_store(resolved: ResolvedConfig, device: Device, arena: Any) -> WeightStore:
    """Weights travel as engines compute with them: what is rounded away on the way makes the policy another one."""
    from headway.weights.weight_store import WeightStore

    return WeightStore(bucket_mb=choose_bucket_mb(resolved), wire=select_wire_dtype(resolved, device), arena=arena)


def select_wire_dtype(resolved: ResolvedConfig, device: Device) -> torch.dtype:
    """What floating tensors travel as."""
    import torch

    kind = resolved.config.actor_infer.model_args.dtype
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}["fp32" if device == "cpu" else kind]


def choose_bucket_mb(resolved: ResolvedConfig) -> float:
    """Size of a bucket."""
    wanted, usual = resolved.config.weight_transfer, resolved.config.param_update_consume_bucket_mb
    return wanted.bucket_mb or (min(usual, _DELTA_BUCKET_MB) if wanted.delta else usual)


def wrap_weight_source(source: WeightSource, resolved: ResolvedConfig, route: TransportPlan) -> WeightSource:
    """In the trainer's process: what gives versions out."""
    if route.way != "disk":
        return source

    from headway.weights.disk_transport import DiskSource, VersionDirectory

    shard_mb = resolved.config.param_update_produce_bucket_mb
    return DiskSource(source, VersionDirectory(route.directory, keep=_VERSIONS_ON_DISK, shard_mb=shard_mb))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverEnd:
    """In the process of an engine, or of a scorer that follows the trainer."""

    read: Callable[[Any], Any]
    """Opens payloads."""
    keeps: bool = False
    """The bytes of what is served stay at hand, for buckets that did not change."""

    @classmethod
    def of(cls, route: TransportPlan, name: str, device: Device) -> ReceiverEnd:
        """What an engine called `name` needs; a scorer has no name, and reads what the trainer gave out."""
        return cls(read=_make_payload_reader(route, name, device), keeps=route.delta)

    def around(self, receiver: WeightReceiver) -> WeightReceiver:
        """The engine's receiver, as others see it."""
        if not self.keeps:
            return receiver

        from headway.weights.delta_transport import RetainingReceiver

        return RetainingReceiver(receiver, read=self.read)


def _make_payload_reader(route: TransportPlan, name: str, device: Device) -> Callable[[Any], Any]:
    from headway.weights.shared_memory import PayloadReader

    if route.way == "broadcast" and name:
        from headway.weights.broadcast_transport import BroadcastInbox

        host, _, port = route.rendezvous.rpartition(":")
        return BroadcastInbox(name, host, int(port)).buffer
    if route.way == "cuda_ipc":
        from headway.weights.device_memory import CudaMemory, IpcPayloadReader

        return IpcPayloadReader(CudaMemory(device)).buffer
    return PayloadReader().buffer
