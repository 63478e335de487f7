"""Puts every part of a run into an actor of a Ray cluster. `RayCluster.start` is a `StartPeer`.

    cluster = RayCluster(address="auto")
    cluster.plan({"trainer": ResourceRequest(node=0, cpus=1), "engine/0": ResourceRequest(node=1, cpus=1)})
    peer = await cluster.start(ChildSpec(name="trainer", …))

All requests are reserved before the first part starts: a run that does not fit starts nothing. They are one placement
group or, with GPUs, one for each node of the run. A part without a request (an engine that joins later) is placed
wherever the cluster has what the first part of its kind was given. When a node is lost, Ray finds another place for its
bundle, and restarted parts go there.

Actors and groups belong to this driver's job: they are gone with it, however it ends.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headway.cluster.ray.ray_session import (
    LOCAL,
    ClusterNode,
    ResourceRequest,
    check_resource_requests,
    connect_to_ray,
    describe_this_machine,
    disconnect_from_ray,
    format_resources,
    group_for_reservation,
    group_into_bundles,
    list_nodes,
)
from headway.processes.base import ChildSpec, Peer, PeerLost

_POLL_S = 1.0


class RayCluster:
    """A Ray cluster. One of our own is started with the first part; another is connected to when it is first needed."""

    def __init__(
        self, *, address: str = LOCAL, runtime_env: Mapping[str, Any] | None = None, timeout_s: float = 120.0
    ) -> None:
        self.address = address
        self.requests: dict[str, ResourceRequest] = {}
        self._runtime_env = dict(runtime_env or {})
        self._timeout_s = timeout_s
        self._connecting = asyncio.Lock()
        self._connected = self._owned = False
        self._groups: list[Any] = []
        self._reserved = False

    def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the machines of the cluster, or this one if the cluster is not started yet. Raises `ConfigError`."""
        if self.address == LOCAL and not self._connected:
            return (describe_this_machine(),)
        self._connect()
        return list_nodes()

    def plan(self, requests: Mapping[str, ResourceRequest]) -> None:
        """Set what every part is given. Raises `ConfigError` if the cluster could never give it."""
        self.requests = dict(requests)
        nodes = self.nodes()
        if self.address == LOCAL:  # it gets as many CPU slots as are needed; its GPUs are given
            needed = float(sum(request.cpus for request in requests.values()))
            nodes = tuple(ClusterNode(name=node.name, cpus=max(node.cpus, needed), gpus=node.gpus) for node in nodes)
        check_resource_requests(self.requests, nodes, address=self.address)

    @property
    def summary(self) -> str:
        """One line for people: the machines, and what each part is given."""
        nodes, requests = self.nodes(), self.requests.items()
        parts = ", ".join(f"{name} on {one.node} ({format_resources(one.resources)})" for name, one in requests)
        machines = f"{len(nodes)} machine{'' if len(nodes) == 1 else 's'}: {', '.join(node.text for node in nodes)}"
        return f"Ray at {self.address}, {machines}; by nodes of the run: {parts}"

    def get_request(self, name: str) -> ResourceRequest:
        """Return what a part is given. A part that was not planned gets what the first of its kind got."""
        kind = name.partition("/")[0]
        alike = [request for other, request in self.requests.items() if other.partition("/")[0] == kind]
        return self.requests.get(name) or (alike[0] if alike else ResourceRequest(node=0, cpus=1))

    async def start(self, spec: ChildSpec) -> Peer:
        """Start a part in an actor. Raises `PeerLost` if there are no resources in time, or what the target raised."""
        from headway.cluster.ray.ray_peer import RayPeer

        async with self._connecting:
            await self._reserve()
        request = self.get_request(spec.name)
        return await RayPeer.start(
            spec,
            lambda: self._make_actor(spec.name, request),
            self._timeout_s,
            here="working_dir" not in self._runtime_env,
            waits_for=f"{format_resources(request.resources)} on node {request.node} of the run",
        )

    async def close(self) -> None:
        """Give back all resources, and end a cluster of our own. Idempotent."""
        async with self._connecting:
            await asyncio.to_thread(self._disconnect)

    def _connect(self) -> None:
        if not self._connected:
            needed = sum(request.cpus for request in self.requests.values())
            self._owned = connect_to_ray(self.address, runtime_env=self._runtime_env, cpus=needed)
            self._connected = True

    async def _reserve(self) -> None:
        """Connect, and reserve everything that was planned."""
        await asyncio.to_thread(self._connect)
        if self._reserved or not self.requests:
            return
        from ray.util.placement_group import placement_group

        wanted = group_for_reservation(self.requests)
        for group in wanted[len(self._groups) :]:
            bundles = [dict(bundle) for bundle in group.bundles.values()]
            self._groups.append(await asyncio.to_thread(placement_group, bundles, strategy=group.strategy))
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._timeout_s
        while not await asyncio.to_thread(self._wait_briefly):  # short, so that it can be cancelled
            if clock() > end_s:
                await asyncio.to_thread(self._remove_groups)
                needed = "; ".join(map(format_resources, group_into_bundles(self.requests).values()))
                nodes = ", ".join(node.text for node in list_nodes())
                raise PeerLost(
                    f"the Ray cluster at {self.address} had no room after {self._timeout_s:g} s for {needed}: "
                    f"it has {nodes}, and others use it"
                )
        self._reserved = True

    def _wait_briefly(self) -> bool:
        """Return whether everything is reserved, or becomes so in a moment."""
        return all(group.wait(_POLL_S) for group in self._groups)

    def _make_actor(self, name: str, request: ResourceRequest) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from headway.cluster.ray.ray_actor import ActorServer

        options: dict[str, Any] = {"num_cpus": request.cpus, "num_gpus": request.gpus, "max_restarts": 0}
        if name in self.requests:
            key = request.node, request.device
            for group, reserved in zip(group_for_reservation(self.requests), self._groups, strict=True):
                if key in group.bundles:
                    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                        placement_group=reserved, placement_group_bundle_index=list(group.bundles).index(key)
                    )
        return ray.remote(ActorServer).options(enable_task_events=False, **options).remote()

    def _remove_groups(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        groups, self._groups, self._reserved = self._groups, [], False
        for group in groups if ray.is_initialized() else ():
            with suppress(Exception):  # the cluster may be gone; the group goes with the job in any case
                remove_placement_group(group)

    def _disconnect(self) -> None:
        if not self._connected:
            return
        self._remove_groups()
        if self._owned:
            disconnect_from_ray()
        self._connected = self._owned = False
