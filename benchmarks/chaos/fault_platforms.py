"""Platforms of a run: this machine, or a Ray cluster on it; and checks that a run leaves them as it found them.

Everything that a platform starts carries a mark in its environment, so that processes that outlive it are found. A Ray
cluster is also asked for its actors and placement groups: any that exist after the run are leftovers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from benchmarks.chaos.fault_runs import find_marked_processes

PLATFORM_MARK = "HEADWAY_CHAOS_STAGE"
RAY_CLEANUP_TIMEOUT_S = 20.0
"""How long Ray may take to remove the actors of a run that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlatform:
    """A platform that is up."""

    options: Mapping[str, object] = field(default_factory=dict)
    raylets: frozenset[int] = frozenset()
    """Process ids of the nodes that may be killed."""
    find_leftovers: Callable[[], list[str]] = list
    """Describes what it still holds of a run that has ended."""
    mark: str = ""
    """Mark in the environment of its processes."""

    def list_leftover_processes(self) -> list[str]:
        """Describe the processes that are alive after it was shut down."""
        return (
            [f"process {pid} of the platform is left" for pid in find_marked_processes(self.mark, PLATFORM_MARK)]
            if self.mark
            else []
        )


@contextmanager
def use_local_machine() -> Iterator[RunPlatform]:
    """Use this machine as it is."""
    yield RunPlatform()


@contextmanager
def start_ray_cluster() -> Iterator[RunPlatform]:
    """Start a Ray cluster of a head and four nodes on this machine; the run needs one node fewer."""
    from ray.cluster_utils import Cluster

    mark = os.environ[PLATFORM_MARK] = uuid4().hex
    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**node) for _ in range(4)]
        cluster.wait_for_nodes()
        options = {"cluster.kind": "ray", "cluster.address": cluster.address, "num_gpus_per_node": 1}
        for role in ("actor_train", "actor_infer"):
            options[f"{role}.strategy_args.strategy_config.num_threads"] = 1
        raylets = frozenset(one.all_processes["raylet"][0].process.pid for one in nodes)
        yield RunPlatform(
            options=options, raylets=raylets, find_leftovers=lambda: _find_ray_leftovers(cluster.address), mark=mark
        )
    finally:
        cluster.shutdown()
        del os.environ[PLATFORM_MARK]


def _find_ray_leftovers(address: str) -> list[str]:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")
    try:
        deadline = time.monotonic() + RAY_CLEANUP_TIMEOUT_S
        while (found := _list_ray_entries()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found
    finally:
        ray.shutdown()


def _list_ray_entries() -> list[str]:
    import ray

    actors = [one for one in ray._private.state.actors().values() if one["State"] != "DEAD"]
    groups = [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
    named = [f"actor {one['Name'] or one['ActorID']} is left: {one['State']}" for one in actors]
    return named + [f"placement group {one['placement_group_id']} is left: {one['state']}" for one in groups]
