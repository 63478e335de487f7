"""A run on a Ray cluster: the machine that its nodes make up, and what each component asks of them.

A device is a GPU where models run on GPUs, else a CPU slot. Components on one device are in one bundle, so that
they get the same GPU; those of one node of the run are on one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headway.cluster.ray.ray_cluster import RayCluster
from headway.cluster.ray.ray_session import ClusterNode, ResourceRequest, check_ray_installed, resolve_address
from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.placement.component_places import ComponentPlace
from headway.placement.device_pools import names_devices
from headway.placement.machine import Machine
from headway.weights.transports import Device


def connect_cluster(resolved: ResolvedConfig) -> RayCluster:
    """Return the cluster that the configuration names; nothing is started there. Raises `ConfigError`."""
    check_ray_installed()
    config = resolved.config.cluster
    return RayCluster(
        address=resolve_address(config.address), runtime_env=config.runtime_env, timeout_s=config.start_timeout_s
    )


def select_cluster_device(resolved: ResolvedConfig, nodes: Sequence[ClusterNode]) -> Device:
    """Return what models run on in the cluster. Raises `ConfigError`."""
    wanted, gpus = resolved.config.device, sum(node.gpus for node in nodes)
    if wanted == "cuda" and not gpus:
        raise ConfigError("the Ray cluster has no GPU", key="device", value=wanted, hint="cpu, or auto")
    return "cuda" if gpus and wanted != "cpu" else "cpu"


def make_cluster_machine(resolved: ResolvedConfig, nodes: Sequence[ClusterNode]) -> Machine:
    """Return the nodes of the run as equal machines: all that the cluster has, or as many as the configuration says.

    Machines with fewer GPUs than `num_gpus_per_node` make nodes of fewer GPUs if there is no larger one.
    """
    derived, says = resolved.derived, resolved.provenance.get
    if select_cluster_device(resolved, nodes) == "cpu":
        slots = derived.num_gpus_per_node
        return Machine(cores=slots, gpus=0, nodes=derived.num_nodes, logical_devices=slots)
    cards = [int(node.gpus) for node in nodes if node.gpus >= 1]
    size = derived.num_gpus_per_node
    if says("num_gpus_per_node", "default").startswith("derived: ") and not names_devices(resolved):
        size = min(cards)
    size = min(size, max(cards))
    there = sum(count // size for count in cards)
    if not says("num_nodes", "default").startswith("derived: ") or names_devices(resolved):
        there = min(there, -(-derived.num_nodes * derived.num_gpus_per_node // size))
    memory = min(node.gpu_memory_gib for node in nodes if node.gpus >= 1)
    return Machine(cores=int(sum(node.cpus for node in nodes)), gpus=size, nodes=there, gpu_memory_gib=memory)


def make_resource_requests(
    resolved: ResolvedConfig, places: Mapping[str, ComponentPlace], device: Device
) -> dict[str, ResourceRequest]:
    """Return the resources of each component by its name. Components that share a GPU have equal shares of it."""
    sharing = Counter(place.devices[0] for place in places.values())
    requests = {}
    for name, place in places.items():
        role = resolved.config.actor_infer if name.startswith("engine/") else resolved.config.actor_train
        cpus = role.strategy_args.strategy_config.num_threads or (len(place.devices) if device == "cpu" else 1)
        first, gpus = place.devices[0], round(1 / sharing[place.devices[0]], 4)
        requests[name] = (
            ResourceRequest(node=place.node, cpus=cpus, gpus=gpus, device=first)
            if device == "cuda"
            else ResourceRequest(node=place.node, cpus=cpus)
        )
    return requests
