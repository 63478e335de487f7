"""What each part of a run is given on a cluster, and whether that is there. Knows nothing of Ray itself.

Devices are numbered over the nodes of a run: node n holds those from n·num_gpus_per_node. All that parts on one node
are given is one bundle, so that it is always on one machine; different nodes are on different machines where there are
enough of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """Of one part."""

    node: int
    """Of the run, not of the cluster: whoever has the same number is on the same machine."""
    cpus: int
    gpus: float = 0.0

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A machine of a cluster."""

    name: str
    cpus: float
    gpus: float

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus}

    @property
    def text(self) -> str:
        return f"{self.name} ({format_resources(self.resources)})"


def group_into_bundles(rooms: Mapping[str, ResourceRequest]) -> dict[int, dict[str, float]]:
    """All that is needed on each node of the run, in the order of the nodes."""
    found: dict[int, dict[str, float]] = {}
    for room in sorted(rooms.values(), key=lambda room: room.node):
        bundle = found.setdefault(room.node, {})
        for kind, amount in room.resources.items():
            bundle[kind] = round(bundle.get(kind, 0.0) + amount, 4)
    return found


def check_resource_requests(
    rooms: Mapping[str, ResourceRequest], nodes: Sequence[ClusterNode], *, address: str
) -> None:
    """Raises `ConfigError` for what could never be placed on these nodes, however free they are."""
    bundles = group_into_bundles(rooms)
    there = ", ".join(node.text for node in nodes)
    for kind, noun in (("GPU", "GPUs"), ("CPU", "CPU slots")):
        wanted = sum(bundle.get(kind, 0.0) for bundle in bundles.values())
        total = sum(node.resources[kind] for node in nodes)
        if wanted > total + 1e-6:
            _refuse(f"the run needs {wanted:g} {noun}, and the Ray cluster has {total:g}: {there}", address)
        for number, bundle in bundles.items():
            most = max((node.resources[kind] for node in nodes), default=0.0)
            if bundle.get(kind, 0.0) > most + 1e-6:
                parts = ", ".join(name for name, room in rooms.items() if room.node == number)
                what = f"node {number} of the run ({parts}) needs {format_resources(bundle)} on one machine"
                _refuse(f"{what}, and the Ray cluster has {there}", address)


def _refuse(what: str, address: str) -> None:
    hint = "fewer devices in device_mapping, a smaller num_gpus_per_node, fewer num_threads, or a larger cluster"
    raise ConfigError(what, key="cluster.address", value=address, hint=hint)


def format_resources(resources: Mapping[str, float]) -> str:
    """`2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount or kind == "CPU")
