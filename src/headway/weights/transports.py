"""Choose how weights travel from the trainer into the engines, and make both ends of that transport.

`plan_transport` makes the choice once. Everything that depends on it follows from the `TransportPlan`, which every
component gets as JSON:

    controller   make_transport(resolved, plan)                           carries buckets
    trainer      make_published_store(resolved, device, plan)             publishes versions and hands them out
    engine       make_receiver_end(plan, name, device)                    opens payloads, keeps what delta needs

An engine that joins late needs nothing else: it is sent the newest version by the same transport.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.config import ResolvedConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from headway.weights.base import PublishingStore, WeightReceiver, WeightTransport
    from headway.weights.weight_store import WeightStore

Device = Literal["cpu", "cuda"]
TransportKind = Literal["in_process", "shared_memory", "disk", "broadcast", "cuda_ipc", "object_store"]
_KEY = "weight_transfer.transport"
_LOOPBACK = "127.0.0.1"
_DELTA_BUCKET_MB = 16.0
"""Largest bucket of a delta transfer: one changed number sends its whole bucket."""
VERSIONS_ON_DISK = 3
"""Versions that stay: the newest, the one before it, and one for an engine that is slow to read."""
_BROADCAST_TIMEOUT_S = 60.0
HELD_VERSIONS = 2
_VERSIONS_ON_GPU = 4
"""Versions on a GPU at once: two that are held, one that arrives, one that replaces it."""
_GPU_SHARE_FOR_VERSIONS = 0.15
"""Largest share of a GPU's memory for versions; beyond it they go through the memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPlan:
    """The transport of a run, and what both of its ends have to know."""

    kind: TransportKind = "in_process"
    delta: bool = False
    """Whether buckets that did not change are left out."""
    rendezvous: str = ""
    """`host:port` at which a broadcast is reached."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Library of a broadcast: through the memory of the hosts, or from GPU to GPU."""
    directory: str = ""
    """Directory into which versions are written."""
    compare: bool = False
    """Whether engines compute a checksum of what they serve."""
    versions: int = HELD_VERSIONS
    """Versions that the trainer keeps for engines: two while one may be on its way, one where engines wait for it."""
    adapters: bool = False
    """Whether a version is adapters alone, which engines put on top of a base of their own."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Trainer rank whose copy each component reads, by its name; those that are left out read that of rank 0."""

    @property
    def publishers(self) -> tuple[int, ...]:
        """Trainer ranks that hold versions for others."""
        return tuple(sorted(set(self.sources.values()))) or (0,)

    @property
    def buffers(self) -> int:
        """Most versions in memory at once: where several are kept, the next one is written beside them."""
        return self.versions + (self.versions > 1)

    def to_json(self) -> dict[str, Any]:
        """Return the plan for a child process, which makes it again by `TransportPlan(**…)`."""
        return asdict(self)


def plan_transport(
    resolved: ResolvedConfig, *, device: str, processes: bool, sources: Mapping[str, int] | None = None
) -> TransportPlan:
    """Plan the transport that the configuration asks for, or one that suits the placement. Raises `ConfigError`.

    `sources` names the trainer rank that each engine reads from, where engines and ranks share devices.
    """
    kind = select_transport_kind(resolved, device=device, processes=processes, colocated=bool(sources))
    given = resolved.config.weight_transfer.directory
    directory = Path(given).expanduser() if given else Path(resolved.config.output_dir).expanduser() / "weights"
    return TransportPlan(
        kind=kind,
        delta=resolved.config.weight_transfer.delta,
        rendezvous=_choose_rendezvous(resolved) if kind == "broadcast" else "",
        backend=_choose_backend(resolved, device),
        directory=str(directory.absolute()) if kind == "disk" else "",
        compare=resolved.config.weight_transfer.compare_served,
        sources=(sources or {}) if kind == "cuda_ipc" else {},
    )


def select_transport_kind(
    resolved: ResolvedConfig, *, device: str, processes: bool, colocated: bool = False
) -> TransportKind:
    """Return what the configuration asks for, or what suits the placement. Raises `ConfigError`."""
    wanted = resolved.config.weight_transfer
    if not processes:
        if wanted.transport != "auto" or wanted.delta:
            key, value = (_KEY, wanted.transport) if wanted.transport != "auto" else ("weight_transfer.delta", True)
            problem = "trainer and engines are threads of one process here, and weights are handed over"
            raise ConfigError(problem, key=key, value=value, hint="processes: true")
        return "in_process"
    virtual = resolved.config.devices.count is not None
    if wanted.transport == "cuda_ipc" and device != "cuda" and not virtual:
        hint = "shared_memory, or devices: {count: …} for logical devices"
        raise ConfigError("needs a GPU", key=_KEY, value=wanted.transport, hint=hint)
    if wanted.transport != "auto":
        return wanted.transport
    if colocated and not wanted.delta and (device == "cuda" or virtual):
        return "cuda_ipc"
    return "object_store" if resolved.config.cluster.kind == "ray" else "shared_memory"


def _choose_backend(resolved: ResolvedConfig, device: str) -> Literal["gloo", "nccl"]:
    """Return the library of a broadcast. Raises `ConfigError` where nccl is asked for and cannot be used."""
    train, wanted = resolved.config.actor_train, resolved.config.weight_transfer.backend
    ranks_key = "actor_train.strategy_args.strategy_config.distributed_backend"
    given = {ranks_key: train.strategy_args.strategy_config.distributed_backend, "weight_transfer.backend": wanted}
    for key, value in given.items():
        if value == "nccl" and device != "cuda":
            raise ConfigError("needs GPUs", key=key, value=value, hint="gloo")
    devices = resolved.derived.devices
    if wanted == "nccl" and devices["actor_train"][0] in devices["actor_infer"]:
        problem = f"needs a GPU at each end, and device {devices['actor_train'][0]} is the trainer's and an engine's"
        raise ConfigError(problem, key="weight_transfer.backend", value=wanted, hint="gloo, or transport: cuda_ipc")
    return wanted or "gloo"


def plan_transport_without_trainer(plan: TransportPlan, *, clustered: bool) -> TransportPlan:
    """Return the plan for engines that get their weights once, from the controller's process."""
    if plan.kind == "in_process":
        return TransportPlan()
    return TransportPlan(kind="object_store" if clustered else "shared_memory")


def _choose_rendezvous(resolved: ResolvedConfig) -> str:
    given, key = resolved.config.weight_transfer.address, "weight_transfer.address"
    if given is None and resolved.config.cluster.kind == "ray":
        raise ConfigError("where do engines on other machines reach this one?", key=key, value=None, hint="10.0.0.1")
    host, colon, port = (given or _LOOPBACK).rpartition(":")
    if not colon:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{port}:{probe.getsockname()[1]}"
    if not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError("is no address", key=key, value=given, hint="host, or host:port")
    return f"{host}:{port}"


# -- in the controller


def make_transport(resolved: ResolvedConfig, plan: TransportPlan) -> WeightTransport:
    """Make what carries buckets. Raises `ConfigError` when the address of a broadcast cannot be used."""
    from headway.weights.delta_transport import DeltaTransport

    transport = _make_plain_transport(resolved, plan)
    return DeltaTransport(transport) if plan.delta else transport


def _make_plain_transport(resolved: ResolvedConfig, plan: TransportPlan) -> WeightTransport:
    from headway.weights.disk_transport import DiskTransport
    from headway.weights.host_transports import InProcessTransport, ObjectTransport, SharedMemoryTransport

    if plan.kind == "broadcast":
        return _make_broadcast_transport(resolved, plan)
    if plan.kind == "disk":
        return DiskTransport()
    if plan.kind == "shared_memory":
        return SharedMemoryTransport()
    if plan.kind == "object_store":
        return ObjectTransport()
    return InProcessTransport()  # the payload itself says where the bytes are


def _make_broadcast_transport(resolved: ResolvedConfig, plan: TransportPlan) -> WeightTransport:
    from headway.weights.broadcast_transport import BroadcastTransport

    reliability, device = resolved.config.reliability, "cpu"
    bucket_s = reliability.transfer_timeout_s / (reliability.transfer_retries + 1)
    timeout_s = resolved.config.weight_transfer.timeout_s or min(_BROADCAST_TIMEOUT_S, bucket_s)
    if plan.backend == "nccl":
        device = _choose_sending_gpu(resolved)
    host, _, port = plan.rendezvous.rpartition(":")
    try:
        return BroadcastTransport(host=host, port=int(port), timeout_s=timeout_s, backend=plan.backend, device=device)
    except RuntimeError as error:
        problem = f"cannot be listened at: {str(error).splitlines()[0]}"
        raise ConfigError(problem, key="weight_transfer.address", value=plan.rendezvous) from error


def _choose_sending_gpu(resolved: ResolvedConfig) -> str:
    """Return the GPU from which the controller broadcasts: that of the trainer, which is no member of the group."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        problem = "the controller broadcasts, and its machine has no GPU"
        raise ConfigError(problem, key="weight_transfer.backend", value="nccl", hint="gloo")
    return f"cuda:{resolved.derived.devices['actor_train'][0] % count}"


# -- in the process of the trainer


def make_published_store(
    resolved: ResolvedConfig, device: Device, plan: TransportPlan, rank: int = 0
) -> PublishingStore:
    """Make the store in which a trainer, or a rank of it, publishes versions for engines in other processes."""
    from headway.weights.device_memory import IpcArena, make_shareable_memory
    from headway.weights.disk_transport import DiskStore, VersionDirectory
    from headway.weights.weight_store import ObjectArena, SharedArena

    if plan.kind == "disk":
        directory = VersionDirectory(
            plan.directory, keep=VERSIONS_ON_DISK, shard_mb=resolved.config.param_update_produce_bucket_mb
        )
        return DiskStore(make_weight_store(resolved, device), directory)
    if plan.kind == "cuda_ipc":
        arena = IpcArena(make_shareable_memory(device), rank, held=plan.versions)
        return make_weight_store(resolved, device, arena, versions=plan.versions)
    on_ray = resolved.config.cluster.kind == "ray"  # a broadcast from another machine reads the object store too
    return make_weight_store(resolved, device, ObjectArena() if on_ray else SharedArena())


def make_local_store(resolved: ResolvedConfig, device: Device, parameters: int) -> WeightStore:
    """Make the store for engines in the trainer's own process: on the GPU, if there is enough memory for versions."""
    if device == "cuda" and count_device_version_bytes(parameters):
        from headway.weights.device_memory import DeviceArena

        return make_weight_store(resolved, device, DeviceArena("cuda"))
    return make_weight_store(resolved, device)


def count_device_version_bytes(parameters: int, total: int = 0) -> int:
    """Return the bytes that versions take on a GPU with `total` bytes; 0 where they go through the host's memory."""
    needed = 2 * parameters * _VERSIONS_ON_GPU
    if not total:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
    return needed if needed < _GPU_SHARE_FOR_VERSIONS * total else 0


def make_weight_store(
    resolved: ResolvedConfig, device: Device, arena: Any = None, *, versions: int = HELD_VERSIONS
) -> WeightStore:
    """Make a store of the newest `versions` in `arena`; `None`: in the heap of this process.

    Weights travel in the precision of the engines: rounding on the way would serve another policy than the trained one.
    """
    from headway.weights.weight_store import WeightStore

    return WeightStore(
        bucket_mb=choose_bucket_mb(resolved),
        wire_dtype=select_wire_dtype(resolved, device),
        arena=arena,
        versions=versions,
    )


def select_wire_dtype(resolved: ResolvedConfig, device: Device) -> torch.dtype:
    """Return the type in which floating-point tensors travel."""
    import torch

    name = "fp32" if device == "cpu" else resolved.config.actor_infer.model_args.dtype
    wide = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return wide.get(name, torch.bfloat16)  # 8 bits are made where they are served


def choose_bucket_mb(resolved: ResolvedConfig) -> float:
    """Return the size of a bucket."""
    transfer, usual = resolved.config.weight_transfer, resolved.config.param_update_consume_bucket_mb
    return transfer.bucket_mb or (min(usual, _DELTA_BUCKET_MB) if transfer.delta else usual)


# -- in the process of an engine, or of a scorer that follows the trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverEnd:
    """The receiving end of a transport."""

    open_payload: Callable[[Any], Any]
    release_payloads: Callable[[], None] | None = None
    """Gives a version that was read back to its trainer; `None`: nothing is held."""
    delta: bool = False
    """Whether the bytes of the served version are kept, for buckets that did not change."""
    checks: bool = False
    """Whether the engine computes a checksum of the tensors that it serves."""

    def wrap_receiver(self, receiver: WeightReceiver) -> WeightReceiver:
        """Return the receiver that the controller sees: one that keeps a copy, where delta needs it."""
        if not self.delta:
            return receiver

        from headway.weights.delta_transport import RetainingReceiver

        return RetainingReceiver(receiver, open_payload=self.open_payload)


def make_receiver_end(plan: TransportPlan, name: str, device: Device) -> ReceiverEnd:
    """Make the end of engine `name`; a scorer has no name, and reads what the trainer published."""
    plain = ReceiverEnd(open_payload=memoryview, delta=plan.delta, checks=plan.compare)
    if plan.kind == "broadcast" and name:
        from headway.weights.broadcast_transport import BroadcastInbox

        host, _, port = plan.rendezvous.rpartition(":")
        inbox = BroadcastInbox(name, host, int(port), device=device if plan.backend == "nccl" else "cpu")
        return replace(plain, open_payload=inbox.open)
    if plan.kind == "cuda_ipc":
        from headway.weights.device_memory import IpcPayloadReader, make_shareable_memory

        reader = IpcPayloadReader(make_shareable_memory(device), plan.sources.get(name, 0))
        return replace(plain, open_payload=reader.open, release_payloads=reader.release)

    from headway.weights.shared_memory import PayloadReader

    return replace(plain, open_payload=PayloadReader().open)
