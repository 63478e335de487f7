"""Ranks of a trainer as actors on nodes of different addresses; started by `make test-ray`.

Both nodes are raylets on this machine; one of them has an address of loopback, so that whoever met at the wrong one
would not meet.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from headway.cluster.ray.ray_cluster import RayCluster
from headway.cluster.ray.ray_session import ResourceRequest
from headway.errors import TrainerCrashed
from headway.processes.base import ChildSpec
from headway.trainers.base import Trainer, TrainerScorer
from headway.trainers.sharded.ranked_trainer import MultiRankTrainer, RankProcesses
from headway.types import Batch

from ..contracts.trainer_contract import TrainerContract, Watched
from ..runs.factory import gone
from ..trainers import factory
from ..trainers.sharded_targets import whole
from .test_ray_nodes import NODE, nothing_left

pytestmark = pytest.mark.ray
OTHER = "127.0.0.2"
LIMIT_S = 150.0


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE, node_ip_address=OTHER)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class RayRanks(Watched, MultiRankTrainer):
    @property
    def peers(self) -> list[Any]:
        assert isinstance(self._child, RankProcesses)
        return list(self._child._peers)


class OnRay:
    """Runs a scenario on the cluster, and closes what it has made; then nothing is left there."""

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        async def closed() -> None:
            self.made: list[RayRanks] = []
            self.clusters: list[RayCluster] = []
            async with asyncio.timeout(LIMIT_S):
                try:
                    await scenario
                finally:
                    await asyncio.gather(*(trainer.close() for trainer in self.made))
                    for cluster in self.clusters:
                        await cluster.close()

        asyncio.run(closed())
        nothing_left()

    def ranked(self, **args: Any) -> RayRanks:
        """Two ranks, on the two nodes."""
        cluster = RayCluster(address="auto", timeout_s=100.0)
        cluster.plan({f"trainer/{rank}": ResourceRequest(node=rank, cpus=1) for rank in range(2)})
        spec = ChildSpec(name="trainer", target="tests.trainers.sharded_targets:rank", args={**args, "objects": True})
        self.clusters.append(cluster)
        self.made.append(RayRanks(spec, cluster.start, ranks=2))
        return self.made[-1]


class TestRanksOnRay(OnRay, TrainerContract):
    def make(self) -> Trainer:
        return self.ranked()

    def batch(self, trained: int) -> Batch:
        return factory.batch(trained)

    async def crash(self, trainer: Trainer) -> None:
        assert isinstance(trainer, RayRanks)
        os.kill(trainer.peers[1].pid, signal.SIGKILL)

    def contents(self, trainer: Trainer) -> object:
        assert isinstance(trainer, RayRanks)
        return trainer.contents

    def test_ranks_on_two_nodes_learn_what_one_process_learns_also_after_a_death(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            options = {"tensor": 2, "model": "qwen3", "tokens": 40}
            one, many = whole(options), self.ranked(**options)
            await many.start()
            assert OTHER in (hosts := {peer.host for peer in many.peers}) and len(hosts) == 2
            await self.compare(one, many, 0)
            await many.save(tmp_path / "a")
            await self.compare(one, many, 1)
            pids = [peer.pid for peer in many.peers]
            step = asyncio.create_task(MultiRankTrainer.train(many, factory.batch(2)))
            await asyncio.sleep(0)
            os.kill(pids[0], signal.SIGKILL)
            with pytest.raises(TrainerCrashed, match=r"trainer/0 \(actor, process \d+ on "):
                await step
            assert gone(pids, 10.0), "the other waits for it no longer"
            await many.restart()
            await many.load(tmp_path / "a")
            await one.load(tmp_path / "a")
            await self.compare(one, many, 1)
            await one.close()

        self.run(scenario())

    async def compare(self, one: Any, many: RayRanks, trained: int) -> None:
        batch = factory.batch(trained, groups=3)
        alone, together = await one.train(batch), await many.train(batch)
        for name in ("loss", "grad_norm", "entropy", "ratio_mean"):
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
        ours = await TrainerScorer(many, "policy").score(factory.group(7))
        for left, right in zip(ours, await one.score("policy", factory.group(7)), strict=True):
            assert list(left) == pytest.approx(right, abs=1e-4)
