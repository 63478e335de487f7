"""Plan where the components of a run live: device, processes, threads, trainer ranks, resources on a cluster.

`plan_placement` maps a configuration and a machine to a `Placement`. It starts nothing, and rejects what cannot run.
docs/architecture.md says how components share a machine, docs/sharding.md which ranks a trainer has. Idle processes
leave their cores to others: a step of the example took 13 s on two cores instead of 20 s with one core each. Idle
threads must then sleep, not spin (`OMP_WAIT_POLICY`, set for every child). On one GPU the roles are threads of one
process, because two processes on one GPU hardly overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from headway.cluster.ray.ray_cluster import RayCluster
from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.models.model_shapes import ModelShape, find_model_shape
from headway.placement.adapter_serving import plan_adapters
from headway.placement.component_places import (
    SCORERS,
    ComponentPlace,
    assign_devices,
    check_8_bits,
    count_engine_devices,
    find_idle_cards,
    find_weight_sources,
    format_numbers,
    has_own_critic,
    make_places,
    make_rank_names,
)
from headway.placement.device_pools import RoleDevices, fit_device_pools
from headway.placement.machine import Machine, make_visible_gpus_env, read_machine
from headway.placement.memory_budget import MemoryBudget, budget_memory
from headway.placement.memory_model import GIB, HOST, MemoryModel
from headway.placement.ray_resources import connect_cluster, make_cluster_machine, make_resource_requests
from headway.placement.server_requirements import (
    check_server_requirements,
    check_shared_gpu_memory,
    uses_external_engines,
    uses_in_process_vllm,
)
from headway.placement.trainer_ranks import count_trainer_ranks, explain_rank_layout, plan_rank_layout
from headway.processes.base import StartPeer
from headway.processes.child_process import ChildProcess
from headway.trainers.sharded.rank_layout import RankLayout
from headway.weights.transports import Device, TransportPlan, plan_transport, plan_transport_without_trainer

LENT_ENGINE = "engine/lent-0"
"""Name of the engine that runs on the trainer's devices while the trainer is idle."""
_ACTORS = ("trainer", "engine")
_FEW_CORES = 4
"""Up to this many cores, every component may use all of them."""


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
    budget: MemoryBudget | None = None
    """Memory of the cards; `None`: on a CPU, or where cards or model are not known."""
    micro_batch: int = 0
    """Samples of a forward and backward pass, where memory asks for fewer than configured; 0: as configured."""
    notes: tuple[str, ...] = ()
    """Sentences that a user should read before the run starts."""

    def list_components(self, role: str) -> list[str]:
        """Return the names of the components of a role, such as `trainer`, `engine` or `reference`."""
        return [name for name in self.places if name.partition("/")[0] == role]

    def list_reward_components(self, name: str) -> list[str]:
        """Return the names of the processes of a reward's model."""
        return [one for one in self.places if one.partition("/")[0] == "reward" and one.split("/")[1] == name]

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
            layout = f"; {self.ranks} ranks of the trainer: {self.layout.summary}" if self.ranks > 1 else ""
            return f"{self.device} on {self.cluster.summary}{layout}"
        where = "processes" if self.processes else "threads of one process"
        if self.gpus:
            shown: dict[str, set[int]] = {}
            for name, gpu in self.gpus.items():
                shown.setdefault(name if name == LENT_ENGINE else name.partition("/")[0], set()).add(gpu)
            where += " on GPUs: " + ", ".join(f"{name} {format_numbers(list(gpus))}" for name, gpus in shown.items())
        engines = f"{self.replicas} engine{'s' if self.replicas > 1 else ''} × {self.infer_threads}"
        trainer = f"{self.ranks} ranks of the trainer" if self.ranks > 1 else "trainer"
        layout = f" ({self.layout.summary})" if self.ranks > 1 else ""
        return f"{self.device}: {trainer} × {self.train_threads}{layout} and {engines} CPU threads, as {where}"


def plan_placement(
    resolved: ResolvedConfig, machine: Machine | None = None, shape: ModelShape | None = None, *, trains: bool = True
) -> Placement:
    """Plan what the configuration asks for, or what suits the machine (`None`: this one). Raises `ConfigError`.

    `shape` is that of the policy; `None`: as its directory or its name says, where they say anything. Without `trains`
    memory is planned for engines alone.
    """
    check_server_requirements(resolved)
    if resolved.config.cluster.kind != "ray":
        return plan_on_machine(resolved, machine or read_machine(), shape, trains=trains)
    cluster = connect_cluster(resolved)
    placement = plan_on_machine(resolved, make_cluster_machine(resolved, cluster.nodes()), shape, trains=trains)
    requests = make_resource_requests(resolved, placement.places, placement.device)
    cluster.plan(requests)
    places = {name: replace(place, threads=requests[name].cpus) for name, place in placement.places.items()}
    train, infer = (max((p.threads for n, p in places.items() if n.startswith(kind)), default=1) for kind in _ACTORS)
    return replace(placement, cluster=cluster, places=places, train_threads=train, infer_threads=infer)


def plan_on_machine(
    resolved: ResolvedConfig, machine: Machine, shape: ModelShape | None = None, *, trains: bool = True
) -> Placement:
    """Plan a run on any machine, or on several equal ones; this one is not looked at. Raises `ConfigError`."""
    placement = _plan_components(resolved, machine)
    if not trains:
        engines = {name: place for name, place in placement.places.items() if name.startswith("engine/")}
        placement = replace(placement, places=engines)
    return plan_memory(resolved, placement, shape or find_policy_shape(resolved))


def _plan_components(resolved: ResolvedConfig, machine: Machine) -> Placement:
    """Return the components on their devices; transport and memory are not planned yet."""
    config, urls = resolved.config, resolved.config.actor_infer.strategy_args.strategy_config.url
    check_8_bits(resolved, device := _select_device(config.device, machine))
    on_ray = config.cluster.kind == "ray"
    if device == "cuda" or not on_ray:  # a device of a CPU is a slot of the cluster
        machine = machine.arrange(config.devices, device)
    alone = device == "cuda" and machine.devices * machine.nodes == 1 and not on_ray
    separate = config.processes is not False and not alone
    counted = device == "cuda" or config.devices.count is not None
    pools = fit_device_pools(resolved, machine) if counted else RoleDevices(devices=resolved.derived.devices)
    processes = separate or (config.processes is not False and uses_in_process_vllm(resolved)) or bool(config.processes)
    ranks = count_trainer_ranks(resolved, device, pools.devices["actor_train"], separate=separate or device == "cpu")
    layout = plan_rank_layout(resolved, ranks, device=device, processes=processes)
    replicas = len(urls) or _count_engines(resolved, device, pools, separate=separate)
    threads_per_engine = max((machine.cores // 2) // replicas, 1)
    share_all = resolved.derived.hybrid_engine or (machine.cores <= _FEW_CORES and replicas == 1)
    together = machine.cores if machine.cores <= _FEW_CORES else max(machine.cores // replicas, 1)
    train = machine.cores if share_all or urls else max(machine.cores - threads_per_engine * replicas, 1)
    placement = Placement(
        device=device,
        processes=processes,
        layout=layout,
        train_threads=config.actor_train.strategy_args.strategy_config.num_threads or max(train // ranks, 1),
        infer_threads=config.actor_infer.strategy_args.strategy_config.num_threads
        or (together if share_all else threads_per_engine),
        replicas=replicas,
        machine=machine,
        notes=(*pools.notes, *explain_rank_layout(resolved, layout), *_note_sharing(resolved, machine, pools)),
    )
    placement = _add_places(resolved, placement, pools, separate=separate)
    _check_lending(resolved, device, placement.gpus)
    return placement


def _count_engines(resolved: ResolvedConfig, device: Device, pools: RoleDevices, *, separate: bool) -> int:
    """Return the number of engines: one for each device or group of devices, or one that shares with the trainer."""
    config = resolved.config
    counted = config.devices.count is not None or config.actor_infer.device_mapping is not None
    if (device == "cpu" and not counted and config.cluster.kind != "ray") or (device == "cuda" and not separate):
        return 1
    group, there = count_engine_devices(resolved), len(pools.devices["actor_infer"])
    if there < group:
        problem, key = (
            f"an engine takes {group} devices, and actor_infer has {there} here",
            "actor_infer.device_mapping",
        )
        raise ConfigError(problem, key=key, value=there, hint="smaller parallel sizes of actor_infer")
    return there // group


def _add_places(resolved: ResolvedConfig, placement: Placement, pools: RoleDevices, *, separate: bool) -> Placement:
    """Return the placement with the devices of its components, and on GPUs with the card of each process."""
    machine, on_gpu = placement.machine, placement.device == "cuda"
    assigned = assign_devices(resolved, pools.devices, placement.ranks, placement.replicas)
    if not placement.processes:  # the trainer is scorer and critic too
        assigned = {name: devices for name, devices in assigned.items() if name.partition("/")[0] not in SCORERS}
    if on_gpu and not separate:
        assigned = dict.fromkeys(assigned, (0,))
    elif on_gpu:
        assigned |= {name: devices[:1] for name, devices in assigned.items() if name == "critic"}  # it is one process
    if resolved.config.actor_infer.strategy_args.strategy_config.url:  # these engines run elsewhere
        assigned = {name: () if name.startswith("engine/") else devices for name, devices in assigned.items()}
    is_engine = {name: name.startswith("engine/") for name in assigned}
    threads = {name: placement.infer_threads if is_engine[name] else placement.train_threads for name in assigned}
    places = make_places(assigned, machine, threads, takes_turns=resolved.derived.hybrid_engine)
    placement = replace(placement, places=places)
    if on_gpu and placement.idle_cards:
        placement = replace(placement, notes=(*placement.notes, _describe_idle_cards(placement.idle_cards)))
    if not (on_gpu and separate) or resolved.config.cluster.kind == "ray":  # Ray says who sees which card
        return placement
    external = uses_external_engines(resolved)  # servers are told their cards by their command line
    gpus = {name: place.cards[0] for name, place in places.items() if not (external and is_engine[name])}
    gpus["trainer"] = places[make_rank_names(placement.ranks)[0]].cards[0]
    if resolved.config.lend_idle_trainer:
        gpus[LENT_ENGINE] = gpus["trainer"]
    return replace(placement, gpus=gpus)


def _note_sharing(resolved: ResolvedConfig, machine: Machine, pools: RoleDevices) -> list[str]:
    """Return what a user should know of nodes that are not reached, and of roles that share devices or leave some."""
    notes, alpha = [], resolved.config.async_generation_ratio
    if machine.nodes > 1 and resolved.config.cluster.kind != "ray":
        notes.append(f"{machine.nodes} nodes are reached with cluster.kind: ray; without it a run has those of one")
    if resolved.derived.hybrid_engine and alpha > 0 and machine.devices * machine.nodes > 1:
        notes.append(
            f"trainer and engines take turns on their devices: with α = {alpha:g} answers may be older, "
            "but generation stops during a step; hybrid_engine: false gives each role devices of its own"
        )
    if has_own_critic(resolved) and len(unused := pools.devices["critic"][1:]):
        what = f"device {unused[0]} is" if len(unused) == 1 else f"devices {format_numbers(unused)} are"
        notes.append(f"critic: one process, on device {pools.devices['critic'][0]}; {what} not used by it")
    return notes


def _describe_idle_cards(cards: Sequence[int]) -> str:
    shown = f"GPU {cards[0]} is" if len(cards) == 1 else f"GPUs {format_numbers(cards)} are"
    return f"{shown} idle: no role was given work there"


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


def make_visible_devices_env(placement: Placement, name: str) -> dict[str, str]:
    """Return the environment in which the GPU of component `name` is the first one.

    It is the only one, unless weights are read from the GPU of a trainer rank elsewhere.
    """
    gpus = [placement.gpus[name]] if name in placement.gpus else []
    if gpus and placement.transport.kind == "cuda_ipc" and not name.startswith("trainer"):
        source = placement.transport.sources.get(name, 0)
        gpus = list(dict.fromkeys((*gpus, placement.gpus.get(f"trainer/{source}", placement.gpus["trainer"]))))
    return make_visible_gpus_env(gpus) if gpus else {}


# -- memory


def find_policy_shape(resolved: ResolvedConfig) -> ModelShape | None:
    """Return the shape of the policy as far as its directory or its name says it."""
    config = resolved.config
    if resolved.derived.pipeline == "denoising":
        return None
    return find_model_shape(config.actor_train.model_args.model_name_or_path or config.pretrain)


def plan_memory(
    resolved: ResolvedConfig, placement: Placement, shape: ModelShape | None, *, merges: bool = False
) -> Placement:
    """Return the placement with transport and memory. Raises `ConfigError` where the cards have not enough.

    Nothing is budgeted on a CPU, or where the cards or the model are not known. Versions stay on the cards of ranks and
    engines that share them if there is room: one where engines wait for it, else three. Of several ways to get by, one
    in which moments and versions stay on the cards is chosen, then one in which engines need not sleep. If nothing
    fits, micro-batches are made smaller. `merges` says that adapters of this model cannot be served by themselves.
    """
    options = _list_transports(resolved, placement, 0 if merges else placement.ranks)
    if shape is None or placement.device == "cpu" or not placement.machine.gpu_memory_gib:
        return replace(placement, transport=options[0])
    given = micro = resolved.config.actor_train.training_args.per_device_train_batch_size
    while True:
        try:
            fewer = 0 if micro == given else micro
            return _choose_transport(resolved, replace(placement, micro_batch=fewer), shape, options)
        except ConfigError:
            if micro == 1:
                raise
            micro //= 2


def _choose_transport(
    resolved: ResolvedConfig, placement: Placement, shape: ModelShape, options: Sequence[TransportPlan]
) -> Placement:
    """Return the placement with the best of these transports. Raises `ConfigError` where none fits."""
    plans, refusal = [], ConfigError("")
    for number, transport in enumerate(options):
        placed = replace(placement, transport=transport)
        model = make_memory_model(resolved, placed, shape)
        try:
            budget = budget_memory(placed.places, placed.machine, model, served=uses_external_engines(resolved))
        except ConfigError as error:
            refusal = error
            continue
        through_host = transport.kind != options[0].kind
        notes = [*budget.notes]
        if through_host:
            size = model.estimate_rank(0).get(f"{HOST}:versions", 0) / GIB
            notes.append(f"versions of the weights, {size:.1f} GiB, go through the host: the GPUs have no room")
        if placed.micro_batch:
            given = resolved.config.actor_train.training_args.per_device_train_batch_size
            what = f"{placed.micro_batch} instead of {given} samples are computed at once, for want of memory"
            notes.append(f"per_device_train_batch_size: {what}; what a step learns stays the same")
        planned = replace(placed, places=budget.places, budget=budget, notes=(*placed.notes, *notes))
        plans.append(((budget.offloads, through_host, budget.engines_sleep, number), planned))
    if not plans:
        raise refusal
    return min(plans, key=lambda plan: plan[0])[1]


def _list_transports(resolved: ResolvedConfig, placement: Placement, ranks: int) -> list[TransportPlan]:
    """Return the transports that may be used: on the cards that engines share with ranks, then the plain one."""
    plan = partial(plan_transport, resolved, device=placement.device, processes=placement.processes)
    trains = any(name.startswith("trainer") for name in placement.places)
    plain = plan_adapters(resolved, plan(), ranks if trains else 0)
    if resolved.config.cluster.kind == "ray" or not (trains and placement.processes):
        return [plain]
    if uses_external_engines(resolved) and plain.kind != "cuda_ipc":
        return [plain]
    check_shared_gpu_memory(resolved, placement.places)
    near = replace(plan(sources=find_weight_sources(placement.places, placement.ranks)), adapters=plain.adapters)
    if near.kind == "cuda_ipc" and resolved.derived.hybrid_engine and resolved.config.async_generation_ratio == 0:
        near = replace(near, versions=1)  # engines have read a version before the next one is made
    return [near, *([plain] if plain.kind != near.kind else [])]


def make_memory_model(resolved: ResolvedConfig, placement: Placement, shape: ModelShape) -> MemoryModel:
    """Return what the memory of the components is computed from."""
    args, derived = resolved.config.actor_train.model_args, resolved.derived
    adapters = (
        None if args.lora_rank is None else shape.count_adapter_parameters(args.lora_rank, frozenset(args.lora_target))
    )
    named = resolved.config.critic.model_args.model_name_or_path or resolved.config.reward_pretrain
    critic = find_model_shape(named) or shape
    return MemoryModel(
        resolved=resolved,
        device=placement.device,
        processes=placement.processes,
        parameters=shape.parameters,
        trained=shape.parameters if adapters is None else adapters,
        critic=critic.parameters if derived.needs_critic else 0,
        holds_critic=derived.needs_critic and "critic" not in placement.places,
        shape=shape,
        transport=placement.transport,
        ranks=placement.ranks,
        context=placement.layout.context,
        card_bytes=int(placement.machine.gpu_memory_gib * GIB),
        holds_reference=derived.needs_reference and not placement.list_components("reference"),
        micro_batch=placement.micro_batch,
    )
