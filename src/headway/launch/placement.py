"""Which ranks a trainer has, and what of a configuration they can do.

A rank is a process for each device of `actor_train.device_mapping`: a GPU, or on a CPU a share of its cores. Layers are
cut over `tensor_model_parallel_size` of them, sequences over `context_parallel_size`, weights over all others
(`fsdp2_train`); what is left works on different samples. On a CPU, sizes without a `device_mapping` make as many ranks
as they need. Whatever ranks cannot do, and sizes that one process would have to ignore, are refused here, before
anything starts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headway.cluster.ray.ray_cluster import RayCluster
from headway.cluster.ray.ray_session import check_ray_installed, resolve_address
from headway.cluster.ray.resource_requests import ClusterNode, ResourceRequest, format_resources
from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.launch.inference_servers import (
    check_server_requirements,
    uses_external_engines,
    uses_in_process_vllm,
)
from headway.launch.transports import TransportPlan, plan_transport, plan_transport_without_trainer
from headway.processes.base import StartPeer
from headway.processes.child_process import ChildProcess
from headway.trainers.sharded.rank_layout import RankLayout

_SIZES = "actor_train.strategy_args.strategy_config"
_SHARING_SIZES = ("tensor_model_parallel_size", "context_parallel_size")
_DEVICES = "actor_train.device_mapping"
_UNSUPPORTED_SIZES = {
    "pipeline_model_parallel_size": "layers are not laid out one device after the other in this build",
    "expert_model_parallel_size": "models with experts are not trained in this build",
}


def count_trainer_ranks(resolved: ResolvedConfig, device: str, *, apart: bool) -> int:
    """Processes of the trainer. `apart`: each of its devices can have one of its own."""
    if not apart:
        return 1
    if device == "cpu" and resolved.config.actor_train.device_mapping is None:
        sizes = resolved.config.actor_train.strategy_args.strategy_config
        return sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return len(resolved.derived.devices["actor_train"])


def make_rank_names(ranks: int) -> list[str]:
    """Of the trainer's processes."""
    return ["trainer"] if ranks == 1 else [f"trainer/{rank}" for rank in range(ranks)]


def assign_rank_devices(resolved: ResolvedConfig, ranks: int) -> dict[str, tuple[int, ...]]:
    """The devices of each of the trainer's processes: equal shares, in order."""
    devices = resolved.derived.devices["actor_train"]
    each = len(devices) // ranks
    return {name: tuple(devices[rank * each : (rank + 1) * each]) for rank, name in enumerate(make_rank_names(ranks))}


def make_rank_layout(resolved: ResolvedConfig, ranks: int) -> RankLayout:
    """Who has what. Raises `ConfigError` where the sizes do not divide the ranks."""
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    if ranks == 1:
        return RankLayout(ranks=1)
    return RankLayout(ranks=ranks, tensor=sizes.tensor_model_parallel_size, context=sizes.context_parallel_size)


def plan_rank_layout(resolved: ResolvedConfig, ranks: int, *, device: str, processes: bool) -> RankLayout:
    """How so many share what is asked for. Raises `ConfigError` where they cannot."""
    config = resolved.config
    for name, problem in _UNSUPPORTED_SIZES.items():
        size = getattr(config.actor_train.strategy_args.strategy_config, name)
        if size > 1:
            hint = "1; tensor_model_parallel_size cuts layers, and weights are cut over all ranks anyway"
            raise ConfigError(problem, key=f"{_SIZES}.{name}", value=size, hint=hint)
    if ranks == 1:
        _check_single_rank(resolved)
        return RankLayout(ranks=1)
    layout, (key, value, one) = make_rank_layout(resolved, ranks), _find_ranks_key(resolved)
    if not processes:
        problem = f"{ranks} ranks of the trainer are processes"
        raise ConfigError(problem, key="processes", value=False, hint=f"true, or {key}: {one}")
    if resolved.derived.pipeline == "denoising":
        raise ConfigError("flow models are trained on one device", key=key, value=value, hint=one)
    if config.actor_train.training_args.offload_optimizer and device == "cuda":
        problem = "moments of ranks are not kept in the memory of the host"
        raise ConfigError(problem, key="actor_train.training_args.offload_optimizer", value=True, hint="more ranks")
    if config.actor_train.model_args.lora_rank is not None and layout.tensor > 1:
        problem = "adapters are not cut by columns and rows"
        sized = f"{_SIZES}.{_SHARING_SIZES[0]}"
        raise ConfigError(problem, key=sized, value=layout.tensor, hint="1: adapters go with cut weights and sequences")
    return layout


def _check_single_rank(resolved: ResolvedConfig) -> None:
    """One process shares nothing with anybody."""
    for name in _SHARING_SIZES:
        size = getattr(resolved.config.actor_train.strategy_args.strategy_config, name)
        if size > 1:
            problem = f"the trainer would be one process here, and {size} ranks were to share its work"
            hint = (
                f"1, or {_DEVICES} with GPUs of this machine (a multiple of {size}) that actor_infer does not have, "
                "and processes left out"
            )
            raise ConfigError(problem, key=f"{_SIZES}.{name}", value=size, hint=hint)


def _find_ranks_key(resolved: ResolvedConfig) -> tuple[str, object, str]:
    """Why there are several: the key, its value, and what makes it one."""
    given, sizes = resolved.config.actor_train.device_mapping, resolved.config.actor_train.strategy_args.strategy_config
    name = next((name for name in _SHARING_SIZES if getattr(sizes, name) > 1), "")
    if given is None and name:
        return f"{_SIZES}.{name}", getattr(sizes, name), "1"
    return _DEVICES, None if given is None else list(given), str([resolved.derived.devices["actor_train"][0]])


def check_tensor_parallel_model(layout: RankLayout, path: Path) -> None:
    """Whether the layers of the model can be shared. Reads its shapes only. Raises `ConfigError`."""
    if layout.tensor == 1:
        return

    from headway.models import make_architecture_factory
    from headway.trainers.sharded.sharded_model import check_tensor_parallel, find_decoder_layers, make_parallel_plan

    backbone = make_architecture_factory(path)().base_model
    check_tensor_parallel(backbone.config, layout.tensor)
    for layer in find_decoder_layers(backbone):
        make_parallel_plan(layer, layout.tensor)


_SCORERS = ("logp", "reference")


def has_own_replica(resolved: ResolvedConfig, role: str) -> bool:
    """Whether `logp` or `reference` was given devices that the trainer does not have."""
    devices: Mapping[str, tuple[int, ...]] = resolved.derived.devices
    return not set(devices[role]) & set(devices["actor_train"])


def select_cluster_device(resolved: ResolvedConfig, nodes: Sequence[ClusterNode]) -> Literal["cpu", "cuda"]:
    """What models run on there. Raises `ConfigError`."""
    wanted, gpus = resolved.config.device, sum(node.gpus for node in nodes)
    if wanted == "cuda" and not gpus:
        raise ConfigError("the Ray cluster has no GPU", key="device", value=wanted, hint="cpu, or auto")
    return "cuda" if gpus and wanted != "cpu" else "cpu"


def make_resource_requests(
    resolved: ResolvedConfig, device: Literal["cpu", "cuda"], ranks: int
) -> dict[str, ResourceRequest]:
    """By the name of the part. Raises `ConfigError` for parts that would need several GPUs."""
    held = assign_devices(resolved, ranks)
    if device == "cuda":
        _check_single_gpu_engines(resolved, held)
    sharing = Counter(devices[0] for devices in held.values())
    per_node = resolved.derived.num_gpus_per_node
    rooms = {}
    for name, devices in held.items():
        room = ResourceRequest(
            node=devices[0] // per_node, cpus=count_component_threads(resolved, name, len(devices), device)
        )
        rooms[name] = replace(room, gpus=round(1 / sharing[devices[0]], 4)) if device == "cuda" else room
    return rooms


def count_component_threads(resolved: ResolvedConfig, name: str, devices: int, device: Literal["cpu", "cuda"]) -> int:
    """CPU threads of a part: as many as it was told, else as it has slots."""
    role = resolved.config.actor_infer if name.startswith("engine/") else resolved.config.actor_train
    return role.strategy_args.strategy_config.num_threads or (devices if device == "cpu" else 1)


def assign_devices(resolved: ResolvedConfig, ranks: int) -> dict[str, tuple[int, ...]]:
    """Numbers of the run's devices, by the name of the part."""
    devices, derived = resolved.derived.devices, resolved.derived
    found = assign_rank_devices(resolved, ranks)
    each = len(devices["actor_infer"]) // derived.replicas
    for number in range(derived.replicas):
        found[f"engine/{number}"] = tuple(devices["actor_infer"][number * each : (number + 1) * each])
    if derived.pipeline == "denoising":
        return found
    needed = {"logp": derived.needs_proximal, "reference": derived.needs_reference}
    return found | {role: tuple(devices[role]) for role in _SCORERS if needed[role] and has_own_replica(resolved, role)}


def _check_single_gpu_engines(resolved: ResolvedConfig, held: Mapping[str, tuple[int, ...]]) -> None:
    if len(held["engine/0"]) > 1:
        raise ConfigError(
            "an engine of this build is on one GPU",
            key="actor_infer.device_mapping",
            value=list(resolved.derived.devices["actor_infer"]),
            hint="as many GPUs as engines, without tensor parallelism",
        )


Device = Literal["cpu", "cuda"]
LENT_ENGINE = "engine/lent-0"
"""The engine on the trainer's devices."""
_FEW_CORES = 4
"""Cores up to which nobody is kept from any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One machine's share-out."""

    device: Device
    processes: bool
    """Trainer and engines each in a process of their own."""
    train_threads: int
    infer_threads: int
    replicas: int
    cards: Mapping[str, int] = field(default_factory=dict)
    """The GPU of each part that has one to itself, by the part's name: `trainer`, `engine/0`, `logp`, `reference`."""
    cluster: RayCluster | None = None
    """Where the parts are started, if that is not this machine."""
    route: TransportPlan = field(default_factory=TransportPlan)
    """How weights get from the trainer into the engines."""
    layout: RankLayout = field(default_factory=lambda: RankLayout(ranks=1))
    """How processes of the trainer share a step; more than one are called `trainer/0` and so on."""

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.layout.ranks

    @property
    def start(self) -> StartPeer:
        """What starts a part that is a process."""
        return ChildProcess.start if self.cluster is None else self.cluster.start

    def without_trainer(self) -> Placement:
        """The same for engines that are given their weights once, by the process that asks them."""
        return replace(self, route=plan_transport_without_trainer(self.route, clustered=self.cluster is not None))

    @property
    def text(self) -> str:
        """One line for people."""
        if self.cluster is not None:
            return _describe_on_ray(self.cluster, self)
        where = "processes" if self.processes else "threads of one process"
        if self.cards:
            apart = {name: card for name, card in self.cards.items() if self.ranks == 1 or name != "trainer"}
            where += f" on GPUs {', '.join(f'{name} {card}' for name, card in apart.items())}"
        engines = f"{self.replicas} engine{'s' if self.replicas > 1 else ''} × {self.infer_threads}"
        trainer = f"{self.ranks} ranks of the trainer" if self.ranks > 1 else "trainer"
        shared = f" ({self.layout.summary})" if self.ranks > 1 else ""
        return f"{self.device}: {trainer} × {self.train_threads}{shared} and {engines} CPU threads, as {where}"


def plan_placement(resolved: ResolvedConfig) -> Placement:
    """What the configuration asks for, or what suits this machine. Raises `ConfigError`."""
    made = _plan_on_this_machine(resolved)
    return replace(made, route=plan_transport(resolved, device=made.device, processes=made.processes))


def _plan_on_this_machine(resolved: ResolvedConfig) -> Placement:
    config, derived = resolved.config, resolved.derived
    check_server_requirements(resolved)
    if config.cluster.kind == "ray":
        return _plan_on_ray(resolved)
    device, servers = _select_device(config.device), config.actor_infer.strategy_args.strategy_config.url
    own = derived.replicas if device == "cuda" or _has_engine_devices(resolved) else 1
    cores, replicas = count_usable_cores(), len(servers) or own
    half = max((cores // 2) // replicas, 1)
    whole = derived.hybrid or (cores <= _FEW_CORES and replicas == 1)
    infer = cores if whole else half
    cards = _assign_gpus(resolved) if device == "cuda" and config.processes is not False else {}
    _check_lending(resolved, device, cards)
    train = cores if whole or servers else max(cores - half * replicas, 1)
    ranks = count_trainer_ranks(resolved, device, apart=device == "cpu" or bool(cards))
    apart = device == "cpu" or bool(cards) or uses_in_process_vllm(resolved)
    processes = config.processes if config.processes is not None else apart
    return Placement(
        device=device,
        processes=processes,
        layout=plan_rank_layout(resolved, ranks, device=device, processes=processes),
        train_threads=config.actor_train.strategy_args.strategy_config.num_threads or max(train // ranks, 1),
        infer_threads=config.actor_infer.strategy_args.strategy_config.num_threads or infer,
        replicas=replicas,
        cards=cards,
    )


def _check_lending(resolved: ResolvedConfig, device: Device, cards: Mapping[str, int]) -> None:
    problem = ""
    if uses_external_engines(resolved):
        problem = "servers are not lent devices"
    elif resolved.config.cluster.kind == "ray":
        problem = "parts on a Ray cluster are not lent devices in this build"
    elif device == "cuda" and not cards:
        problem = "trainer and engines share one GPU here: there is nothing to lend"
    if resolved.config.lend_idle_trainer and problem:
        raise ConfigError(problem, key="lend_idle_trainer", value=True)


def _plan_on_ray(resolved: ResolvedConfig) -> Placement:
    """On a cluster that exists it is asked what it has; nothing is started there."""
    _select_device("cpu")  # models are read here too
    check_ray_installed()
    wanted = resolved.config.cluster
    cluster = RayCluster(
        address=resolve_address(wanted.address), runtime_env=wanted.runtime_env, timeout_s=wanted.start_timeout_s
    )
    device = select_cluster_device(resolved, cluster.nodes())
    _check_lending(resolved, device, {})
    layout = plan_rank_layout(
        resolved, count_trainer_ranks(resolved, device, apart=True), device=device, processes=True
    )
    rooms = make_resource_requests(resolved, device, layout.ranks)
    cluster.plan(rooms)
    return Placement(
        device=device,
        processes=True,
        layout=layout,
        train_threads=rooms[make_rank_names(layout.ranks)[0]].cpus,
        infer_threads=rooms["engine/0"].cpus,
        replicas=resolved.derived.replicas,
        cluster=cluster,
    )


def _describe_on_ray(cluster: RayCluster, place: Placement) -> str:
    nodes = cluster.nodes()
    parts = ", ".join(
        f"{name} on {room.node} ({format_resources(room.resources)})" for name, room in cluster.rooms.items()
    )
    machines = f"{len(nodes)} machine{'' if len(nodes) == 1 else 's'}: {', '.join(node.text for node in nodes)}"
    ranks = f"; {place.ranks} ranks of the trainer: {place.layout.summary}" if place.ranks > 1 else ""
    return f"{place.device} on Ray at {cluster.address}, {machines}; by nodes of the run: {parts}{ranks}"


def _assign_gpus(resolved: ResolvedConfig) -> dict[str, int]:
    """Who has a GPU to itself; nobody where there is one GPU, or trainer and engines are not mapped apart."""
    import torch

    devices, there = resolved.derived.devices, torch.cuda.device_count()
    config = resolved.config
    if (
        there < 2
        or not _has_engine_devices(resolved)
        or config.actor_train.device_mapping is None
        or resolved.derived.hybrid
    ):
        return {}
    for role in (
        ("actor_train",) if config.actor_infer.strategy_args.strategy_config.url else ("actor_train", "actor_infer")
    ):
        if max(devices[role]) >= there:
            raise ConfigError(f"this machine has {there} GPUs", key=f"{role}.device_mapping", value=list(devices[role]))
    found = dict(zip(make_rank_names(len(devices["actor_train"])), devices["actor_train"], strict=True))
    found["trainer"] = devices["actor_train"][0]
    if uses_external_engines(resolved):  # they see to their own GPUs
        return found
    if len(devices["actor_infer"]) != resolved.derived.replicas:
        raise ConfigError(
            "an engine of this build is on one GPU",
            key="actor_infer.device_mapping",
            value=list(devices["actor_infer"]),
            hint="as many GPUs as engines, without tensor parallelism",
        )
    found |= {f"engine/{number}": card for number, card in enumerate(devices["actor_infer"])}
    if config.lend_idle_trainer:
        found[LENT_ENGINE] = found["trainer"]
    return found | {role: devices[role][0] for role in ("logp", "reference") if devices[role][0] < there}


def make_visible_devices_env(place: Placement, name: str) -> dict[str, str]:
    """What a child called `name` has in its environment, so that its GPU is the first one there.

    It is the only one, unless weights are read from the trainer's.
    """
    if name not in place.cards:
        return {}
    ours = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    cards = [place.cards[name]]
    if place.route.way == "cuda_ipc":
        cards = list(dict.fromkeys((*cards, place.cards["trainer"])))
    return {"CUDA_VISIBLE_DEVICES": ",".join(ours[card] if ours else str(card) for card in cards)}


def count_usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_engine_devices(resolved: ResolvedConfig) -> bool:
    return resolved.config.actor_infer.device_mapping is not None


def _select_device(wanted: str) -> Device:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            "training needs torch and transformers", key="device", value=wanted, hint="pip install 'headway[train]'"
        ) from error
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("torch sees no GPU here", key="device", value=wanted, hint="cpu, or auto")
    return "cuda" if there and wanted != "cpu" else "cpu"
