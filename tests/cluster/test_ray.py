"""Parts in Ray actors meet the contract of parts, and weights go through the object store."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from headway.cluster.ray.ray_cluster import RayCluster
from headway.cluster.ray.ray_session import (
    ClusterNode,
    ResourceRequest,
    check_resource_requests,
    connect_to_ray,
    group_into_bundles,
    resolve_address,
)
from headway.errors import ConfigError, TransferError
from headway.processes.base import ChildSpec, Peer, PeerLost
from headway.weights.base import Bucket, ObjectSlice, WeightReceiver, WeightSource, WeightTransport
from headway.weights.host_transports import ObjectTransport
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import ObjectArena

from ..contracts.cluster_contract import ClusterContract
from ..contracts.weights_contract import WeightsContract
from ..weights.test_local_weights import Real, Serving, published, weights
from .ray_session import bounded, small_ray


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with small_ray():
        yield


class TestActors(ClusterContract):
    UP_S = 4.0

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        async def closed() -> None:
            self.cluster = RayCluster(timeout_s=50.0)
            self.cluster.plan({"child/0": ResourceRequest(node=0, cpus=1)})
            try:
                await scenario
            finally:
                await self.cluster.close()

        bounded(closed())

    async def start(self, spec: ChildSpec) -> Peer:
        return await self.cluster.start(spec)

    async def start_within(self, spec: ChildSpec, timeout_s: float) -> Peer:
        self.cluster._timeout_s = timeout_s
        return await self.cluster.start(spec)

    def end(self, peer: Peer) -> None:
        os.kill(peer.pid, signal.SIGKILL)  # type: ignore[attr-defined]


class TestWeightsFromTheHeap(Real, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        return published(), ObjectTransport(), DoubleBufferedReceiver(Serving().switch)

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=ObjectSlice(ref=ray.put(b"\1" * bucket.payload.size), size=bucket.payload.size))


class TestStoredWeights(TestWeightsFromTheHeap):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        return published(arena=ObjectArena()), ObjectTransport(), DoubleBufferedReceiver(Serving().switch)


def test_weights_reach_an_actor_by_reference_and_are_let_go_of() -> None:
    async def scenario() -> None:
        cluster = RayCluster()
        cluster.plan({"child/0": ResourceRequest(node=0, cpus=1)})
        peer = await cluster.start(ChildSpec(name="child/0", target="tests.processes.targets:reader"))
        store = published(arena=ObjectArena(), wire_dtype=None)
        manifest, buckets = await store.gather(2)
        found = [bucket async for bucket in buckets]
        assert all(isinstance(bucket.payload, ObjectSlice) for bucket in found)
        assert await peer.call("sums", found) == manifest.checksums
        assert [bucket.checksum for bucket in await peer.call("back", found)] == list(manifest.checksums)
        lost = found[0].payload.ref.hex()
        store.publish(3, weights(3))
        store.publish(4, weights(4))
        await (await store.gather(4))[1].aclose()
        del found, buckets
        with pytest.raises(TransferError, match="not held"):
            await store.gather(2)
        await until(lambda: lost not in _referenced())
        await peer.close()
        await cluster.close()

    bounded(scenario())


async def until(condition: Callable[[], bool]) -> None:
    """Ray lets go in its own time."""
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _referenced() -> set[str]:
    """Objects that this process still keeps in the store."""
    import ray
    from ray._private.internal_api import memory_summary

    here = ray.get_runtime_context().gcs_address  # or it asks the cluster that was started here last, which may be dead
    return {word for line in memory_summary(here, stats_only=False).splitlines() for word in line.split()}


def test_a_run_that_does_not_fit_now_is_told_what_there_is() -> None:
    async def scenario() -> None:
        first, second = RayCluster(), RayCluster(timeout_s=1.0)
        first.plan({"a": ResourceRequest(node=0, cpus=1)})
        peer = await first.start(ChildSpec(name="a", target="tests.processes.targets:service"))
        second.plan({"b": ResourceRequest(node=0, cpus=2)})
        with pytest.raises(PeerLost, match=r"had no room after 1 s for 2 CPU: it has .* \(2 CPU\), and others use it"):
            await second.start(ChildSpec(name="b", target="tests.processes.targets:service"))
        await second.close()
        with pytest.raises(ConfigError, match="the run needs 3 CPU slots, and the Ray cluster has 2"):
            RayCluster(address="auto").plan({"c": ResourceRequest(node=0, cpus=3)})
        await peer.close()
        await first.close()
        await until(lambda: {one["state"] for one in ray.util.placement_group_table().values()} == {"REMOVED"})

    bounded(scenario())


def test_bundles_are_what_is_needed_on_each_node_and_must_fit_a_machine() -> None:
    rooms = {
        "trainer": ResourceRequest(node=0, cpus=1, gpus=0.5),
        "engine/0": ResourceRequest(node=0, cpus=2, gpus=0.5),
        "engine/1": ResourceRequest(node=1, cpus=2, gpus=1),
    }
    assert group_into_bundles(rooms) == {0: {"CPU": 3, "GPU": 1}, 1: {"CPU": 2, "GPU": 1}}
    large, small = ClusterNode(name="a", cpus=8, gpus=1), ClusterNode(name="b", cpus=2, gpus=1)
    check_resource_requests(rooms, [large, small], address="x")
    with pytest.raises(ConfigError, match=r"needs 2 GPUs, and the Ray cluster has 1: a \(8 CPU, 1 GPU\)"):
        check_resource_requests(rooms, [large], address="x")
    with pytest.raises(ConfigError, match=r"node 0 of the run \(trainer, engine/0\) needs 3 CPU, 1 GPU on one machine"):
        check_resource_requests(rooms, [small, small, small], address="x")


def test_an_address_where_nobody_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    assert resolve_address(None) == nobody and resolve_address("auto") == "auto"
    monkeypatch.delenv("RAY_ADDRESS")
    assert resolve_address(None) == "local"
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address, problem in (
        (nobody, "nobody answers there"),
        ("ray://x:1", "no address of the head"),
        ("x", "no addr"),
    ):
        with pytest.raises(ConfigError, match=problem) as refused:
            connect_to_ray(address, runtime_env={})
        assert (refused.value.key, refused.value.value) == ("cluster.address", address)
