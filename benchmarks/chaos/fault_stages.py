"""What a run stands on beside this machine, and whether that was left as it was found.

Everything that a stage starts carries a mark in its environment, so that what outlives it can be counted. A cluster is
asked for its own books, too: an actor or a placement group that it still has after the run is one that was left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from benchmarks.chaos.fault_runs import marked

MARK = "HEADWAY_CHAOS_STAGE"
BOOKS_S = 20.0
"""How long a cluster may take to close its books on a run that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of them, while it stands."""

    options: Mapping[str, object] = field(default_factory=dict)
    raylets: frozenset[int] = frozenset()
    """Processes of nodes that may be lost."""
    books: Callable[[], list[str]] = list
    """What it still has of a run that has ended, in words."""
    mark: str = ""
    """Of its processes."""

    def left(self) -> list[str]:
        """What is there of it after it was taken down."""
        return [f"process {pid} of the stage is left" for pid in marked(self.mark, MARK)] if self.mark else []


@contextmanager
def nothing() -> Iterator[Stage]:
    """This machine is enough."""
    yield Stage()


@contextmanager
def ray_nodes() -> Iterator[Stage]:
    """A Ray cluster of a head and four nodes on this machine, one of them to spare."""
    from ray.cluster_utils import Cluster

    mark = os.environ[MARK] = uuid4().hex
    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**node) for _ in range(4)]
        cluster.wait_for_nodes()
        options = {"cluster.kind": "ray", "cluster.address": cluster.address, "num_gpus_per_node": 1}
        for role in ("actor_train", "actor_infer"):
            options[f"{role}.strategy_args.strategy_config.num_threads"] = 1
        raylets = frozenset(one.all_processes["raylet"][0].process.pid for one in nodes)
        yield Stage(options=options, raylets=raylets, books=lambda: _books(cluster.address), mark=mark)
    finally:
        cluster.shutdown()
        del os.environ[MARK]


def _books(address: str) -> list[str]:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")
    try:
        deadline = time.monotonic() + BOOKS_S
        while (found := _open_entries()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found
    finally:
        ray.shutdown()


def _open_entries() -> list[str]:
    import ray

    actors = [one for one in ray._private.state.actors().values() if one["State"] != "DEAD"]
    groups = [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
    named = [f"actor {one['Name'] or one['ActorID']} is left: {one['State']}" for one in actors]
    return named + [f"placement group {one['placement_group_id']} is left: {one['state']}" for one in groups]
