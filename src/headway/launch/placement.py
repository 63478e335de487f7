"""Plan where the components of a run live: device, processes, threads, trainer ranks, resources on a cluster.

`plan_placement` maps a configuration and a machine to a `Placement`. It starts nothing, and rejects what cannot run.
docs/architecture.md says how components share a machine, docs/sharding.md which ranks a trainer has. Idle processes
leave their cores to others: a step of the example took 13 s on two cores instead of 20 s with one core each. Idle
threads must then sleep, not spin (`OMP_WAIT_POLICY`, set for every child). On one GPU the roles are threads of one
process, because two processes on one GPU hardly overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.cluster.ray.ray_cluster import RayCluster
from headway.cluster.ray.ray_session import (
    ClusterNode,
    ResourceRequest,
    check_ray_installed,
    format_resources,
    resolve_address,
)
from headway.config import ResolvedConfig
from headway.config.resolved_config import get_at_key
from headway.errors import ConfigError
from headway.launch.component_places import (
    ComponentPlace,
    assign_devices,
    find_idle_cards,
    make_places,
    make_rank_names,
)
from headway.launch.inference_servers import (
    check_server_requirements,
    make_visible_gpus_env,
    uses_external_engines,
    uses_in_process_vllm,
)
from headway.launch.machine import Machine, read_machine
from headway.launch.transports import Device, TransportPlan, plan_transport, plan_transport_without_trainer
from headway.processes.base import StartPeer
from headway.processes.child_process import ChildProcess
from headway.trainers.sharded.rank_layout import RankLayout

LENT_ENGINE = "engine/lent-0"
"""Name of the engine that runs on the trainer's devices while the trainer is idle."""
_FEW_CORES = 4
"""Up to this many cores, every component may use all of them."""
_DEVICES_KEY = "actor_train.device_mapping"
_SIZES_KEY = "actor_train.strategy_args.strategy_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the components of a run live."""

    device: Device
    processes: bool
    """Whether trainer and engines each have a process of their own."""
    train_threads: int
    infer_threads: int
    replicas: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPU of each component that has one to itself, by its name: `trainer`, `engine/0`, `logp`, `reference`."""
    cluster: RayCluster | None = None
    """Ray cluster on which the components run; `None`: this machine."""
    transport: TransportPlan = field(default_factory=TransportPlan)
    """How weights get from the trainer into the engines."""
    layout: RankLayout = field(default_factory=lambda: RankLayout(ranks=1))
    """How trainer ranks share a step; several ranks are called `trainer/0`, `trainer/1` and so on."""
    machine: Machine = field(default_factory=lambda: Machine(cores=1, gpus=0))
    """What was planned for, with its logical devices."""
    places: Mapping[str, ComponentPlace] = field(default_factory=dict)
    """Devices of every component, by its name."""
    notes: tuple[str, ...] = ()
    """Sentences that a user should read before the run starts."""

    @property
    def idle_cards(self) -> tuple[int, ...]:
        """Cards that no component uses."""
        return find_idle_cards(self.places, self.machine)

    @property
    def ranks(self) -> int:
        """Number of trainer processes."""
        return self.layout.ranks

    @property
    def start_child(self) -> StartPeer:
        """Function that starts a component in a process of its own."""
        return ChildProcess.start if self.cluster is None else self.cluster.start

    def without_trainer(self) -> Placement:
        """Return the same placement for engines that get their weights once, from this process."""
        transport = plan_transport_without_trainer(self.transport, clustered=self.cluster is not None)
        return replace(self, transport=transport)

    @property
    def summary(self) -> str:
        """One line for people."""
        if self.cluster is not None:
            return _summarize_on_ray(self.cluster, self)
        where = "processes" if self.processes else "threads of one process"
        if self.gpus:
            shown = {name: gpu for name, gpu in self.gpus.items() if self.ranks == 1 or name != "trainer"}
            where += f" on GPUs {', '.join(f'{name} {gpu}' for name, gpu in shown.items())}"
        engines = f"{self.replicas} engine{'s' if self.replicas > 1 else ''} × {self.infer_threads}"
        trainer = f"{self.ranks} ranks of the trainer" if self.ranks > 1 else "trainer"
        layout = f" ({self.layout.summary})" if self.ranks > 1 else ""
        return f"{self.device}: {trainer} × {self.train_threads}{layout} and {engines} CPU threads, as {where}"


def plan_placement(resolved: ResolvedConfig, machine: Machine | None = None) -> Placement:
    """Plan what the configuration asks for, or what suits the machine (`None`: this one). Raises `ConfigError`."""
    check_server_requirements(resolved)
    machine = machine or read_machine()
    placement = _plan_on_ray(resolved) if resolved.config.cluster.kind == "ray" else _plan_on_machine(resolved, machine)
    transport = plan_transport(resolved, device=placement.device, processes=placement.processes)
    return replace(placement, transport=transport)


def _plan_on_machine(resolved: ResolvedConfig, machine: Machine) -> Placement:
    config, urls = resolved.config, resolved.config.actor_infer.strategy_args.strategy_config.url
    device = _select_device(config.device, machine)
    machine = machine.arrange(config.devices, device)
    separate = config.processes is not False and (device == "cpu" or machine.devices > 1)
    processes = separate or (config.processes is not False and uses_in_process_vllm(resolved)) or bool(config.processes)
    ranks = count_trainer_ranks(resolved, device, separate=separate or device == "cpu")
    replicas = len(urls) or _count_engines(resolved, device, separate=separate)
    layout = plan_rank_layout(resolved, ranks, device=device, processes=processes)
    threads_per_engine = max((machine.cores // 2) // replicas, 1)
    share_all = resolved.derived.hybrid_engine or (machine.cores <= _FEW_CORES and replicas == 1)
    train = machine.cores if share_all or urls else max(machine.cores - threads_per_engine * replicas, 1)
    placement = Placement(
        device=device,
        processes=processes,
        layout=layout,
        train_threads=config.actor_train.strategy_args.strategy_config.num_threads or max(train // ranks, 1),
        infer_threads=config.actor_infer.strategy_args.strategy_config.num_threads
        or (machine.cores if share_all else threads_per_engine),
        replicas=replicas,
        machine=machine,
    )
    placement = _add_places(resolved, placement, separate=separate)
    _check_lending(resolved, device, placement.gpus)
    return placement


def _count_engines(resolved: ResolvedConfig, device: Device, *, separate: bool) -> int:
    """Return the number of engines: those of the configuration where each has a device, else one."""
    counted = resolved.config.devices.count is not None or resolved.config.actor_infer.device_mapping is not None
    alone = not counted if device == "cpu" else not separate
    return 1 if alone else resolved.derived.replicas


def _add_places(resolved: ResolvedConfig, placement: Placement, *, separate: bool) -> Placement:
    """Return the placement with the devices of its components, and on GPUs with the card of each process."""
    machine, on_gpu = placement.machine, placement.device == "cuda"
    assigned = assign_devices(resolved, placement.ranks, placement.replicas)
    if on_gpu and not separate:
        assigned = dict.fromkeys(assigned, (0,))
    elif on_gpu:
        _check_devices_exist(resolved, machine)
        if len(assigned["engine/0"]) > 1 and not uses_external_engines(resolved):
            raise _make_single_gpu_error(resolved)
    if resolved.config.actor_infer.strategy_args.strategy_config.url:  # these engines run elsewhere
        assigned = {name: () if name.startswith("engine/") else devices for name, devices in assigned.items()}
    is_engine = {name: name.startswith("engine/") for name in assigned}
    threads = {name: placement.infer_threads if is_engine[name] else placement.train_threads for name in assigned}
    places = make_places(assigned, machine, threads, takes_turns=resolved.derived.hybrid_engine)
    if not (on_gpu and separate):
        return replace(placement, places=places)
    external = uses_external_engines(resolved)  # servers are told their cards by their command line
    gpus = {name: place.cards[0] for name, place in places.items() if not (external and is_engine[name])}
    gpus["trainer"] = places[make_rank_names(placement.ranks)[0]].cards[0]
    if resolved.config.lend_idle_trainer:
        gpus[LENT_ENGINE] = gpus["trainer"]
    return replace(placement, places=places, gpus=gpus)


def _check_devices_exist(resolved: ResolvedConfig, machine: Machine) -> None:
    """Refuse devices that the machine does not have."""
    derived, there = resolved.derived, machine.devices * machine.nodes
    by_url = bool(resolved.config.actor_infer.strategy_args.strategy_config.url)
    for role, devices in derived.devices.items():
        if devices and max(devices) >= there and not (by_url and role == "actor_infer"):
            mapped = role != "logp" and get_at_key(resolved.config, f"{role}.device_mapping") is not None
            key = f"{role}.device_mapping" if mapped else "num_gpus_per_node"
            value = list(devices) if mapped else derived.num_gpus_per_node
            noun = "logical devices" if machine.is_virtual else "GPUs"
            hint = f"devices 0 to {there - 1}, or devices: {{count: {max(devices) + 1}}} to let several share a GPU"
            raise ConfigError(f"this machine has {there} {noun}", key=key, value=value, hint=hint)


def _select_device(wanted: str, machine: Machine) -> Device:
    if wanted == "cuda" and not machine.gpus:
        raise ConfigError("torch sees no GPU here", key="device", value=wanted, hint="cpu, or auto")
    return "cuda" if machine.gpus and wanted != "cpu" else "cpu"


def _check_lending(resolved: ResolvedConfig, device: Device, gpus: Mapping[str, int]) -> None:
    problem = ""
    if uses_external_engines(resolved):
        problem = "servers are not lent devices"
    elif resolved.config.cluster.kind == "ray":
        problem = "parts on a Ray cluster are not lent devices in this build"
    elif device == "cuda" and not gpus:
        problem = "trainer and engines share one GPU here: there is nothing to lend"
    if resolved.config.lend_idle_trainer and problem:
        raise ConfigError(problem, key="lend_idle_trainer", value=True)


def _make_single_gpu_error(resolved: ResolvedConfig) -> ConfigError:
    return ConfigError(
        "an engine of this build is on one GPU",
        key="actor_infer.device_mapping",
        value=list(resolved.derived.devices["actor_infer"]),
        hint="as many GPUs as engines, without tensor parallelism",
    )


def make_visible_devices_env(placement: Placement, name: str) -> dict[str, str]:
    """Return the environment in which the GPU of component `name` is the first one.

    It is the only one, unless weights are read from the trainer's GPU.
    """
    if name not in placement.gpus:
        return {}
    gpus = [placement.gpus[name]]
    if placement.transport.kind == "cuda_ipc":
        gpus = list(dict.fromkeys((*gpus, placement.gpus["trainer"])))
    return make_visible_gpus_env(gpus)


# -- ranks of the trainer


def count_trainer_ranks(resolved: ResolvedConfig, device: str, *, separate: bool) -> int:
    """Return the number of trainer processes. `separate`: each of its devices can have a process of its own."""
    if not separate:
        return 1
    config = resolved.config
    if device == "cpu" and config.actor_train.device_mapping is None and config.devices.count is None:
        sizes = resolved.config.actor_train.strategy_args.strategy_config
        return sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return len(resolved.derived.devices["actor_train"])


def make_rank_layout(resolved: ResolvedConfig, ranks: int) -> RankLayout:
    """Return how the ranks share a step. Raises `ConfigError` where the sizes do not divide their number."""
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    if ranks == 1:
        return RankLayout(ranks=1)
    return RankLayout(ranks=ranks, tensor=sizes.tensor_model_parallel_size, context=sizes.context_parallel_size)


def plan_rank_layout(resolved: ResolvedConfig, ranks: int, *, device: str, processes: bool) -> RankLayout:
    """Return how the ranks share a step. Raises `ConfigError` for anything in the configuration that they cannot do."""
    config, sizes = resolved.config, resolved.config.actor_train.strategy_args.strategy_config
    pipeline, expert = sizes.pipeline_model_parallel_size, sizes.expert_model_parallel_size
    for name, size, problem in (
        ("pipeline", pipeline, "layers are not laid out one device after the other in this build"),
        ("expert", expert, "models with experts are not trained in this build"),
    ):
        if size > 1:
            hint = "1; tensor_model_parallel_size cuts layers, and weights are cut over all ranks anyway"
            raise ConfigError(problem, key=f"{_SIZES_KEY}.{name}_model_parallel_size", value=size, hint=hint)
    if ranks == 1:
        _check_single_rank(resolved)
        return RankLayout(ranks=1)
    layout, (key, _, single) = make_rank_layout(resolved, ranks), _find_ranks_key(resolved)
    if not processes:
        problem = f"{ranks} ranks of the trainer are processes"
        raise ConfigError(problem, key="processes", value=False, hint=f"true, or {key}: {single}")
    if resolved.derived.pipeline == "denoising" and layout.data < layout.ranks:
        sharing, size = next(iter(_list_sharing_sizes(resolved).items()))
        problem = "ranks of a denoising model share neither layers nor pictures"
        raise ConfigError(
            problem, key=f"{_SIZES_KEY}.{sharing}", value=size, hint="1: each rank has samples of its own"
        )
    if config.actor_train.training_args.offload_optimizer and device == "cuda":
        problem = "moments of ranks are not kept in the memory of the host"
        raise ConfigError(problem, key="actor_train.training_args.offload_optimizer", value=True, hint="more ranks")
    if config.actor_train.model_args.lora_rank is not None and layout.tensor > 1:
        problem, key = "adapters are not cut by columns and rows", f"{_SIZES_KEY}.tensor_model_parallel_size"
        raise ConfigError(problem, key=key, value=layout.tensor, hint="1: adapters go with cut weights and sequences")
    return layout


def _list_sharing_sizes(resolved: ResolvedConfig) -> dict[str, int]:
    """Return the sizes above 1 that ask several ranks to share work."""
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    given = {
        "tensor_model_parallel_size": sizes.tensor_model_parallel_size,
        "context_parallel_size": sizes.context_parallel_size,
    }
    return {name: size for name, size in given.items() if size > 1}


def _check_single_rank(resolved: ResolvedConfig) -> None:
    """Reject sizes that a single process would have to ignore."""
    for name, size in _list_sharing_sizes(resolved).items():
        problem = f"the trainer would be one process here, and {size} ranks were to share its work"
        hint = (
            f"1, or {_DEVICES_KEY} with GPUs of this machine (a multiple of {size}) that actor_infer does not have, "
            "and processes left out"
        )
        raise ConfigError(problem, key=f"{_SIZES_KEY}.{name}", value=size, hint=hint)


def _find_ranks_key(resolved: ResolvedConfig) -> tuple[str, object, str]:
    """Return the key that asks for several ranks, its value, and the value that would make it one rank."""
    mapping, sizes = resolved.config.actor_train.device_mapping, _list_sharing_sizes(resolved)
    if mapping is None and sizes:
        name, size = next(iter(sizes.items()))
        return f"{_SIZES_KEY}.{name}", size, "1"
    value = None if mapping is None else list(mapping)
    return _DEVICES_KEY, value, str([resolved.derived.devices["actor_train"][0]])


# -- resources on a cluster


def _plan_on_ray(resolved: ResolvedConfig) -> Placement:
    """Ask the cluster for its nodes and plan resources on them; nothing is started there."""
    check_ray_installed()
    config = resolved.config.cluster
    cluster = RayCluster(
        address=resolve_address(config.address), runtime_env=config.runtime_env, timeout_s=config.start_timeout_s
    )
    device = select_cluster_device(resolved, cluster.nodes())
    _check_lending(resolved, device, {})
    ranks = count_trainer_ranks(resolved, device, separate=True)
    layout = plan_rank_layout(resolved, ranks, device=device, processes=True)
    requests = make_resource_requests(resolved, device, layout.ranks)
    cluster.plan(requests)
    return Placement(
        device=device,
        processes=True,
        layout=layout,
        train_threads=requests[make_rank_names(layout.ranks)[0]].cpus,
        infer_threads=requests["engine/0"].cpus,
        replicas=resolved.derived.replicas,
        cluster=cluster,
    )


def select_cluster_device(resolved: ResolvedConfig, nodes: Sequence[ClusterNode]) -> Device:
    """Return what models run on in the cluster. Raises `ConfigError`."""
    wanted, gpus = resolved.config.device, sum(node.gpus for node in nodes)
    if wanted == "cuda" and not gpus:
        raise ConfigError("the Ray cluster has no GPU", key="device", value=wanted, hint="cpu, or auto")
    return "cuda" if gpus and wanted != "cpu" else "cpu"


def make_resource_requests(resolved: ResolvedConfig, device: Device, ranks: int) -> dict[str, ResourceRequest]:
    """Return the resources of each component by its name. Raises `ConfigError` for engines that need several GPUs.

    A device is a GPU where models run on GPUs, else a CPU slot. The number of a component's first device says on which
    node of the run it is. Components that share a GPU have equal shares of it.
    """
    assigned = assign_devices(resolved, ranks)
    if device == "cuda" and len(assigned["engine/0"]) > 1:
        raise _make_single_gpu_error(resolved)
    sharing = Counter(devices[0] for devices in assigned.values())
    requests = {}
    for name, devices in assigned.items():
        role = resolved.config.actor_infer if name.startswith("engine/") else resolved.config.actor_train
        cpus = role.strategy_args.strategy_config.num_threads or (len(devices) if device == "cpu" else 1)
        request = ResourceRequest(node=devices[0] // resolved.derived.num_gpus_per_node, cpus=cpus)
        requests[name] = replace(request, gpus=round(1 / sharing[devices[0]], 4)) if device == "cuda" else request
    return requests


def _summarize_on_ray(cluster: RayCluster, placement: Placement) -> str:
    nodes = cluster.nodes()
    components = ", ".join(
        f"{name} on {one.node} ({format_resources(one.resources)})" for name, one in cluster.requests.items()
    )
    machines = f"{len(nodes)} machine{'' if len(nodes) == 1 else 's'}: {', '.join(node.text for node in nodes)}"
    ranks = f"; {placement.ranks} ranks of the trainer: {placement.layout.summary}" if placement.ranks > 1 else ""
    return f"{placement.device} on Ray at {cluster.address}, {machines}; by nodes of the run: {components}{ranks}"
