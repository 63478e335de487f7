"""Where the parts of a run live on this machine: device, processes and threads.

On a CPU trainer and engines are processes of their own. Where cores are few, each gets a thread for every core, and
whoever has work uses what the other leaves: a step of the example took 13 s on two cores instead of 20 s with one core
each. Threads that wait must then sleep, not spin (`OMP_WAIT_POLICY`, set for every child). Many cores are shared out:
half to the engines, the rest to the trainer; roles that take turns (hybrid) get all of them. On one GPU the roles are
threads of one process, because two processes on one card hardly overlap. Where `device_mapping` gives trainer and
engines different GPUs, each is a process that sees its own GPU alone.

On a Ray cluster each is an actor, and `headway.build.rooms` says what it is given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from headway.build.rooms import device_of, rooms_of
from headway.build.servers import check_servers, serves, serves_inside
from headway.build.sharding import check_ranks, rank_names, ranks_of
from headway.build.ways import Route, route_of, without_trainer
from headway.cluster.base import Start
from headway.cluster.process import Child
from headway.cluster.ray.cluster import RayCluster
from headway.cluster.ray.rooms import amounts
from headway.cluster.ray.session import check_installed, resolve
from headway.config import Resolved
from headway.errors import ConfigError
from headway.trainers.sharded.layout import Layout

Device = Literal["cpu", "cuda"]
LENT = "engine/lent-0"
"""The engine on the trainer's devices."""
_FEW = 4
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
    route: Route = field(default_factory=Route)
    """How weights get from the trainer into the engines."""
    layout: Layout = field(default_factory=lambda: Layout(ranks=1))
    """How processes of the trainer share a step; more than one are called `trainer/0` and so on."""

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.layout.ranks

    @property
    def start(self) -> Start:
        """What starts a part that is a process."""
        return Child.start if self.cluster is None else self.cluster.start

    def without_trainer(self) -> Placement:
        """The same for engines that are given their weights once, by the process that asks them."""
        return replace(self, route=without_trainer(self.route, clustered=self.cluster is not None))

    @property
    def text(self) -> str:
        """One line for people."""
        if self.cluster is not None:
            return _text_on(self.cluster, self)
        where = "processes" if self.processes else "threads of one process"
        if self.cards:
            apart = {name: card for name, card in self.cards.items() if self.ranks == 1 or name != "trainer"}
            where += f" on GPUs {', '.join(f'{name} {card}' for name, card in apart.items())}"
        engines = f"{self.replicas} engine{'s' if self.replicas > 1 else ''} × {self.infer_threads}"
        trainer = f"{self.ranks} ranks of the trainer" if self.ranks > 1 else "trainer"
        shared = f" ({self.layout.summary})" if self.ranks > 1 else ""
        return f"{self.device}: {trainer} × {self.train_threads}{shared} and {engines} CPU threads, as {where}"


def place(resolved: Resolved) -> Placement:
    """What the configuration asks for, or what suits this machine. Raises `ConfigError`."""
    made = _placed(resolved)
    return replace(made, route=route_of(resolved, device=made.device, processes=made.processes))


def _placed(resolved: Resolved) -> Placement:
    config, derived = resolved.config, resolved.derived
    check_servers(resolved)
    if config.cluster.kind == "ray":
        return _on_ray(resolved)
    device, servers = _device(config.device), config.actor_infer.strategy_args.strategy_config.url
    own = derived.replicas if device == "cuda" or _mapped(resolved) else 1
    cores, replicas = usable_cores(), len(servers) or own
    half = max((cores // 2) // replicas, 1)
    whole = derived.hybrid or (cores <= _FEW and replicas == 1)
    infer = cores if whole else half
    cards = _cards(resolved) if device == "cuda" and config.processes is not False else {}
    _check_lending(resolved, device, cards)
    train = cores if whole or servers else max(cores - half * replicas, 1)
    ranks = ranks_of(resolved, device, apart=device == "cpu" or bool(cards))
    apart = device == "cpu" or bool(cards) or serves_inside(resolved)
    processes = config.processes if config.processes is not None else apart
    return Placement(
        device=device,
        processes=processes,
        layout=check_ranks(resolved, ranks, device=device, processes=processes),
        train_threads=config.actor_train.strategy_args.strategy_config.num_threads or max(train // ranks, 1),
        infer_threads=config.actor_infer.strategy_args.strategy_config.num_threads or infer,
        replicas=replicas,
        cards=cards,
    )


def _check_lending(resolved: Resolved, device: Device, cards: Mapping[str, int]) -> None:
    problem = ""
    if serves(resolved):
        problem = "servers are not lent devices"
    elif resolved.config.cluster.kind == "ray":
        problem = "parts on a Ray cluster are not lent devices in this build"
    elif device == "cuda" and not cards:
        problem = "trainer and engines share one GPU here: there is nothing to lend"
    if resolved.config.lend_idle_trainer and problem:
        raise ConfigError(problem, key="lend_idle_trainer", value=True)


def _on_ray(resolved: Resolved) -> Placement:
    """On a cluster that exists it is asked what it has; nothing is started there."""
    _device("cpu")  # models are read here too
    check_installed()
    wanted = resolved.config.cluster
    cluster = RayCluster(
        address=resolve(wanted.address), runtime_env=wanted.runtime_env, timeout_s=wanted.start_timeout_s
    )
    device = device_of(resolved, cluster.nodes())
    _check_lending(resolved, device, {})
    layout = check_ranks(resolved, ranks_of(resolved, device, apart=True), device=device, processes=True)
    rooms = rooms_of(resolved, device, layout.ranks)
    cluster.plan(rooms)
    return Placement(
        device=device,
        processes=True,
        layout=layout,
        train_threads=rooms[rank_names(layout.ranks)[0]].cpus,
        infer_threads=rooms["engine/0"].cpus,
        replicas=resolved.derived.replicas,
        cluster=cluster,
    )


def _text_on(cluster: RayCluster, place: Placement) -> str:
    nodes = cluster.nodes()
    parts = ", ".join(f"{name} on {room.node} ({amounts(room.resources)})" for name, room in cluster.rooms.items())
    machines = f"{len(nodes)} machine{'' if len(nodes) == 1 else 's'}: {', '.join(node.text for node in nodes)}"
    ranks = f"; {place.ranks} ranks of the trainer: {place.layout.summary}" if place.ranks > 1 else ""
    return f"{place.device} on Ray at {cluster.address}, {machines}; by nodes of the run: {parts}{ranks}"


def _cards(resolved: Resolved) -> dict[str, int]:
    """Who has a GPU to itself; nobody where there is one GPU, or trainer and engines are not mapped apart."""
    import torch

    devices, there = resolved.derived.devices, torch.cuda.device_count()
    config = resolved.config
    if there < 2 or not _mapped(resolved) or config.actor_train.device_mapping is None or resolved.derived.hybrid:
        return {}
    for role in (
        ("actor_train",) if config.actor_infer.strategy_args.strategy_config.url else ("actor_train", "actor_infer")
    ):
        if max(devices[role]) >= there:
            raise ConfigError(f"this machine has {there} GPUs", key=f"{role}.device_mapping", value=list(devices[role]))
    found = dict(zip(rank_names(len(devices["actor_train"])), devices["actor_train"], strict=True))
    found["trainer"] = devices["actor_train"][0]
    if serves(resolved):  # they see to their own GPUs
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
        found[LENT] = found["trainer"]
    return found | {role: devices[role][0] for role in ("logp", "reference") if devices[role][0] < there}


def seen_by(place: Placement, name: str) -> dict[str, str]:
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


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _mapped(resolved: Resolved) -> bool:
    return resolved.config.actor_infer.device_mapping is not None


def _device(wanted: str) -> Device:
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
