"""A `Start` that puts every part of a run into an actor of a Ray cluster.

    cluster = RayCluster(address="auto")
    cluster.plan({"trainer": Room(node=0, cpus=1), "engine/0": Room(node=1, cpus=1)})
    peer = await cluster.start(ChildSpec(name="trainer", …))

Rooms are one placement group, reserved as a whole before the first part starts: a run that does not fit starts nothing.
A part without a room (an engine that joins later) is placed wherever there is what its kind has been given. When a node
is lost, Ray finds another place for its bundle, and parts that are started again go there.

Actors and the group belong to this driver's job: they are gone with it, by whatever end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headway.cluster.ray.ray_session import (
    LOCAL,
    connect_to_ray,
    describe_this_machine,
    disconnect_from_ray,
    list_nodes,
)
from headway.cluster.ray.resource_requests import (
    ClusterNode,
    ResourceRequest,
    check_resource_requests,
    format_resources,
    group_into_bundles,
)
from headway.processes.base import ChildSpec, Peer, PeerLost

_LOOK_S = 1.0


class RayCluster:
    """One of our own is started when the first part is; another is connected to when it is first asked for anything."""

    def __init__(
        self, *, address: str = LOCAL, runtime_env: Mapping[str, Any] | None = None, timeout_s: float = 120.0
    ) -> None:
        self.address = address
        self.rooms: dict[str, ResourceRequest] = {}
        self._runtime_env = dict(runtime_env or {})
        self._timeout_s = timeout_s
        self._joining = asyncio.Lock()
        self._joined = self._ours = False
        self._group: Any = None
        self._reserved = False

    def nodes(self) -> tuple[ClusterNode, ...]:
        """The machines of the cluster; of one that would be started, this one. Raises `ConfigError`."""
        if self.address == LOCAL and not self._joined:
            return (describe_this_machine(),)
        self._join()
        return list_nodes()

    def plan(self, rooms: Mapping[str, ResourceRequest]) -> None:
        """Who is given what. Raises `ConfigError` when it can never be had."""
        self.rooms = dict(rooms)
        there = self.nodes()
        if self.address == LOCAL:  # its slots are as many as are wanted, GPUs are what they are
            wanted = float(sum(room.cpus for room in rooms.values()))
            there = tuple(ClusterNode(name=node.name, cpus=max(node.cpus, wanted), gpus=node.gpus) for node in there)
        check_resource_requests(self.rooms, there, address=self.address)

    def room(self, name: str) -> ResourceRequest:
        """What a part is given; one that was not planned, as much as the first of its kind."""
        kind = name.partition("/")[0]
        alike = [room for other, room in self.rooms.items() if other.partition("/")[0] == kind]
        return self.rooms.get(name) or (alike[0] if alike else ResourceRequest(node=0, cpus=1))

    async def start(self, spec: ChildSpec) -> Peer:
        """Raises `PeerLost` when there is no room in time, else what the target raised."""
        from headway.cluster.ray.ray_peer import RayPeer

        async with self._joining:
            await self._reserve()
        room = self.room(spec.name)
        return await RayPeer.start(
            spec,
            lambda: self._actor(spec.name, room),
            self._timeout_s,
            here="working_dir" not in self._runtime_env,
            waits_for=f"{format_resources(room.resources)} on node {room.node} of the run",
        )

    async def close(self) -> None:
        """Give back the rooms, and end a cluster of our own. Idempotent."""
        async with self._joining:
            await asyncio.to_thread(self._leave)

    def _join(self) -> None:
        if not self._joined:
            wanted = sum(room.cpus for room in self.rooms.values())
            self._ours = connect_to_ray(self.address, runtime_env=self._runtime_env, cpus=wanted)
            self._joined = True

    async def _reserve(self) -> None:
        """Connected, and everything reserved."""
        await asyncio.to_thread(self._join)
        if self._reserved or not self.rooms:
            return
        from ray.util.placement_group import placement_group

        bundles = list(group_into_bundles(self.rooms).values())
        if self._group is None:
            self._group = await asyncio.to_thread(placement_group, bundles, strategy="SPREAD")
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._timeout_s
        while not await asyncio.to_thread(self._group.wait, _LOOK_S):  # so that whoever is cancelled need not wait long
            if clock() > end_s:
                await asyncio.to_thread(self._give_back)
                wanted, there = "; ".join(map(format_resources, bundles)), ", ".join(node.text for node in list_nodes())
                raise PeerLost(
                    f"the Ray cluster at {self.address} had no room after {self._timeout_s:g} s for {wanted}: "
                    f"it has {there}, and others use it"
                )
        self._reserved = True

    def _actor(self, name: str, room: ResourceRequest) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from headway.cluster.ray.ray_actor import ActorServer

        options: dict[str, Any] = {"num_cpus": room.cpus, "num_gpus": room.gpus, "max_restarts": 0}
        if name in self.rooms:
            bundle = list(group_into_bundles(self.rooms)).index(room.node)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
        return ray.remote(ActorServer).options(enable_task_events=False, **options).remote()

    def _give_back(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        group, self._group, self._reserved = self._group, None, False
        if group is not None and ray.is_initialized():
            with suppress(Exception):  # the cluster may be gone; what is ours goes with the job in any case
                remove_placement_group(group)

    def _leave(self) -> None:
        if not self._joined:
            return
        self._give_back()
        if self._ours:
            disconnect_from_ray()
        self._joined = self._ours = False
