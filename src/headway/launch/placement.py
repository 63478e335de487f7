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
from headway.errors import ConfigError
from headway.launch.inference_servers import (
    check_server_requirements,
    make_visible_gpus_env,
    uses_external_engines,
    uses_in_process_vllm,
)
from headway.launch.transports import Device, TransportPlan, plan_transport, plan_transport_without_trainer
from headway.processes.base import StartPeer
from headway.processes.child_process import ChildProcess, count_usable_cores
from headway.trainers.sharded.rank_layout import RankLayout

LENT_ENGINE = "engine/lent-0"
"""Name of the engine that runs on the trainer's devices while the trainer is idle."""
_FEW_CORES = 4
"""Up to this many cores, every component may use all of them."""
_DEVICES_KEY = "actor_train.device_mapping"
_SIZES_KEY = "actor_train.strategy_args.strategy_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this process may use of the machine it runs on."""

    cores: int
    gpus: int


def read_machine() -> Machine:
    """Look at this machine. Raises `ConfigError` where torch is not installed."""
    try:
        import torch
    except ImportError as error:
        hint = "pip install 'headway[train]'"
        raise ConfigError("training needs torch and transformers", key="device", hint=hint) from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(cores=count_usable_cores(), gpus=gpus)


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
    config, derived = resolved.config, resolved.derived
    device, urls = _select_device(config.device, machine), config.actor_infer.strategy_args.strategy_config.url
    engines = derived.replicas if device == "cuda" or config.actor_infer.device_mapping is not None else 1
    replicas = len(urls) or engines
    threads_per_engine = max((machine.cores // 2) // replicas, 1)
    share_all = derived.hybrid_engine or (machine.cores <= _FEW_CORES and replicas == 1)
    gpus = _assign_gpus(resolved, machine) if device == "cuda" and config.processes is not False else {}
    _check_lending(resolved, device, gpus)
    train = machine.cores if share_all or urls else max(machine.cores - threads_per_engine * replicas, 1)
    separate = device == "cpu" or bool(gpus)
    ranks = count_trainer_ranks(resolved, device, separate=separate)
    processes = config.processes if config.processes is not None else separate or uses_in_process_vllm(resolved)
    return Placement(
        device=device,
        processes=processes,
        layout=plan_rank_layout(resolved, ranks, device=device, processes=processes),
        train_threads=config.actor_train.strategy_args.strategy_config.num_threads or max(train // ranks, 1),
        infer_threads=config.actor_infer.strategy_args.strategy_config.num_threads
        or (machine.cores if share_all else threads_per_engine),
        replicas=replicas,
        gpus=gpus,
    )


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


def _assign_gpus(resolved: ResolvedConfig, machine: Machine) -> dict[str, int]:
    """Give components a GPU each; nothing where there is one GPU, or trainer and engines are not mapped apart."""
    config, devices = resolved.config, resolved.derived.devices
    mapped = config.actor_infer.device_mapping is not None and config.actor_train.device_mapping is not None
    if machine.gpus < 2 or not mapped or resolved.derived.hybrid_engine:
        return {}
    by_url = bool(config.actor_infer.strategy_args.strategy_config.url)
    for role in ("actor_train",) if by_url else ("actor_train", "actor_infer"):
        if max(devices[role]) >= machine.gpus:
            problem, key = f"this machine has {machine.gpus} GPUs", f"{role}.device_mapping"
            raise ConfigError(problem, key=key, value=list(devices[role]))
    gpus = dict(zip(make_rank_names(len(devices["actor_train"])), devices["actor_train"], strict=True))
    gpus["trainer"] = devices["actor_train"][0]
    if uses_external_engines(resolved):  # servers choose their GPUs themselves
        return gpus
    if len(devices["actor_infer"]) != resolved.derived.replicas:
        raise _make_single_gpu_error(resolved)
    gpus |= {f"engine/{number}": gpu for number, gpu in enumerate(devices["actor_infer"])}
    if config.lend_idle_trainer:
        gpus[LENT_ENGINE] = gpus["trainer"]
    return gpus | {role: devices[role][0] for role in ("logp", "reference") if devices[role][0] < machine.gpus}


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
    if device == "cpu" and resolved.config.actor_train.device_mapping is None:
        sizes = resolved.config.actor_train.strategy_args.strategy_config
        return sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return len(resolved.derived.devices["actor_train"])


def make_rank_names(ranks: int) -> list[str]:
    """Return the names of the trainer's processes."""
    return ["trainer"] if ranks == 1 else [f"trainer/{rank}" for rank in range(ranks)]


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
    layout, (key, value, single) = make_rank_layout(resolved, ranks), _find_ranks_key(resolved)
    if not processes:
        problem = f"{ranks} ranks of the trainer are processes"
        raise ConfigError(problem, key="processes", value=False, hint=f"true, or {key}: {single}")
    if resolved.derived.pipeline == "denoising":
        raise ConfigError("denoising models are trained on one device", key=key, value=value, hint=single)
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


# -- devices of components, and their resources on a cluster


def has_own_replica(resolved: ResolvedConfig, role: str) -> bool:
    """Return whether `logp` or `reference` was given devices that the trainer does not have."""
    devices: Mapping[str, tuple[int, ...]] = resolved.derived.devices
    return not set(devices[role]) & set(devices["actor_train"])


def list_scorer_replicas(resolved: ResolvedConfig) -> list[str]:
    """Return the scorers that the run needs and that have devices of their own: `logp`, `reference`."""
    derived = resolved.derived
    if derived.pipeline == "denoising":
        return []
    needed = {"logp": derived.needs_proximal, "reference": derived.needs_reference}
    return [role for role, wanted in needed.items() if wanted and has_own_replica(resolved, role)]


def assign_devices(resolved: ResolvedConfig, ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the devices of each component by their numbers in the run: equal shares, in order."""
    devices, replicas = resolved.derived.devices, resolved.derived.replicas
    assigned: dict[str, tuple[int, ...]] = {}
    for role, names in (
        ("actor_train", make_rank_names(ranks)),
        ("actor_infer", [f"engine/{number}" for number in range(replicas)]),
    ):
        share = len(devices[role]) // len(names)
        for number, name in enumerate(names):
            assigned[name] = tuple(devices[role][number * share : (number + 1) * share])
    return assigned | {role: tuple(devices[role]) for role in list_scorer_replicas(resolved)}


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
