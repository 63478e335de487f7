"""What each part of a run asks of a cluster, and whether the cluster has it. Nothing here needs Ray.

Devices are numbered over the nodes of a run: node n holds those from n·num_gpus_per_node. The requests of all parts on
one node of the run form one bundle, so that they always share a machine. Different nodes are on different machines
where there are enough of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What one part of a run needs."""

    node: int
    """Node of the run, not of the cluster: parts with the same number are on the same machine."""
    cpus: int
    gpus: float = 0.0

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine of a cluster."""

    name: str
    cpus: float
    gpus: float

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus}

    @property
    def text(self) -> str:
        return f"{self.name} ({format_resources(self.resources)})"


def group_into_bundles(requests: Mapping[str, ResourceRequest]) -> dict[int, dict[str, float]]:
    """Sum up the requests for each node of the run, in the order of the nodes."""
    found: dict[int, dict[str, float]] = {}
    for request in sorted(requests.values(), key=lambda request: request.node):
        bundle = found.setdefault(request.node, {})
        for kind, amount in request.resources.items():
            bundle[kind] = round(bundle.get(kind, 0.0) + amount, 4)
    return found


def check_resource_requests(
    requests: Mapping[str, ResourceRequest], nodes: Sequence[ClusterNode], *, address: str
) -> None:
    """Raise `ConfigError` for requests that these nodes could never fulfil, even if all of them were free."""
    bundles = group_into_bundles(requests)
    cluster = ", ".join(node.text for node in nodes)
    for kind, noun in (("GPU", "GPUs"), ("CPU", "CPU slots")):
        needed = sum(bundle.get(kind, 0.0) for bundle in bundles.values())
        total = sum(node.resources[kind] for node in nodes)
        if needed > total + 1e-6:
            _refuse(f"the run needs {needed:g} {noun}, and the Ray cluster has {total:g}: {cluster}", address)
        for number, bundle in bundles.items():
            most = max((node.resources[kind] for node in nodes), default=0.0)
            if bundle.get(kind, 0.0) > most + 1e-6:
                parts = ", ".join(name for name, request in requests.items() if request.node == number)
                problem = f"node {number} of the run ({parts}) needs {format_resources(bundle)} on one machine"
                _refuse(f"{problem}, and the Ray cluster has {cluster}", address)


def _refuse(problem: str, address: str) -> None:
    hint = "fewer devices in device_mapping, a smaller num_gpus_per_node, fewer num_threads, or a larger cluster"
    raise ConfigError(problem, key="cluster.address", value=address, hint=hint)


def format_resources(resources: Mapping[str, float]) -> str:
    """Write resources as text: `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount or kind == "CPU")
