"""Runs on three nodes of Ray, one of which may die; started by `make test-ray`.

The nodes are raylets on this machine. What is checked is read from outside: processes, the ledger as a file, the event
log, and what Ray itself knows of actors and placement groups.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from headway.cluster.ray.ray_cluster import RayCluster
from headway.cluster.ray.ray_session import ResourceRequest
from headway.models.tiny_model import make_tiny_model
from headway.processes.base import ChildSpec

from ..runs.factory import SMALL, audit, count, events, gone, parts_in, rows

pytestmark = pytest.mark.ray

STORE_BYTES = 100 << 20
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": STORE_BYTES}
STEPS = 12
MAPPED: dict[str, Any] = {
    **SMALL,
    "max_steps": STEPS,
    "response_length": 24,
    "processes": True,
    "num_gpus_per_node": 1,
    "actor_train.device_mapping": "[0]",
    "actor_infer.device_mapping": "[1,2]",
    "actor_train.strategy_args.strategy_config.num_threads": 1,
    "actor_infer.strategy_args.strategy_config.num_threads": 1,
    "reliability.restart_backoff_s": 0,
    "cluster.kind": "ray",
}


RANKS: dict[str, Any] = {
    "actor_train__device_mapping": "[0,1]",
    "actor_infer__device_mapping": "[2]",
    "actor_train__training_args__per_device_train_batch_size": 2,
}
"""A trainer of two ranks on two nodes, an engine on the third."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory, steps=0)
    return directory


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Run:
    """`headway train` on a cluster."""

    def __init__(self, directory: Path, model: Path, env: Mapping[str, str] | None = None, **changed: Any) -> None:
        options = {**MAPPED, "pretrain": model, "output_dir": directory}
        options.update({key.replace("__", "."): value for key, value in changed.items()})
        words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]
        self.directory = directory
        self._output = directory.with_name(f"{directory.name}-{time.monotonic_ns()}.out").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headway", "train", *words],
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, **(env or {})},
        )

    @property
    def text(self) -> str:
        return Path(self._output.name).read_text(encoding="utf-8", errors="replace")

    def until(self, condition: Callable[[], Any], timeout_s: float = 240.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.05)

    def end(self, timeout_s: float = 300.0) -> int:
        return self.process.wait(timeout_s)

    def parts(self) -> dict[str, int]:
        return parts_in(self.directory)


def test_what_there_is_and_would_go_where_is_said_without_starting_anything(nodes: Cluster, tmp_path: Path) -> None:
    words = [f"{key}={value}" for key, value in MAPPED.items() if not isinstance(value, bool)]

    def check(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headway", "cluster", "check", *words, *more, "--json"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    found = json.loads(check("async_generation_ratio=1", f"cluster.address={nodes.address}").stdout)
    assert [(node["CPU"], node["GPU"]) for node in found["nodes"]] == [(2.0, 0.0)] * 3
    where = [(part["name"], part["lives"], part["memory"]) for part in found["parts"]]
    assert where == [("trainer", "actor", "node 0"), ("engine/0", "actor", "node 1"), ("engine/1", "actor", "node 2")]
    many = f"actor_infer.device_mapping={list(range(1, 9))}"
    refused = check("num_gpus_per_node=9", many, f"cluster.address={nodes.address}")
    assert refused.returncode == 2 and "the run needs 9 CPU slots, and the Ray cluster has 6" in refused.stderr
    check_nothing_left(nodes)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def check_whole(directory: Path) -> None:
    """All steps, each sample accounted for, no group twice."""
    audit(directory)
    assert events(directory, "run.end")[-1].data["finished"]
    trained = rows(directory, "SELECT trained_at FROM groups WHERE end = 'trained'")
    assert sorted(version for (version,) in trained) == sorted([*range(1, STEPS + 1)] * SMALL["rollout_batch_size"])


def check_nothing_left(cluster: Cluster) -> None:
    """Of actors and placement groups, by Ray's own books."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        nothing_left()
    finally:
        ray.shutdown()


def nothing_left() -> None:
    """The same where this process is connected."""
    end = time.monotonic() + 20
    while True:
        groups = {group["state"] for group in ray.util.placement_group_table().values()}
        actors = {actor["State"] for actor in ray._private.state.actors().values()}
        if groups <= {"REMOVED"} and actors <= {"DEAD"}:
            return
        assert time.monotonic() < end, (groups, actors)
        time.sleep(0.1)


def test_every_part_is_on_a_node_of_its_own_and_nothing_is_left(nodes: Cluster, model: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", model, cluster__address=nodes.address)
    run.until(lambda: count(run.directory, "step.end") >= 2)
    parts = run.parts()
    assert set(parts) == {"trainer", "engine-0", "engine-1"}
    assert len({parent(pid) for pid in parts.values()}) == 3, "two parts have the same raylet"
    assert run.end() == 0, run.text
    assert gone(list(parts.values()), 5.0)
    check_whole(run.directory)
    check_nothing_left(nodes)


@pytest.mark.parametrize("victim", ["engine-1", "trainer"])
def test_a_run_survives_the_loss_of_a_node(nodes: Cluster, model: Path, tmp_path: Path, victim: str) -> None:
    nodes.add_node(**NODE)  # there is another place
    run = Run(tmp_path / "run", model, cluster__address=nodes.address, max_steps=STEPS, save_steps=2)
    run.until(lambda: count(run.directory, "step.end") >= 4)
    lost = run.parts()[victim]
    raylet = parent(lost)
    if raylet == nodes.head_node.all_processes["raylet"][0].process.pid:
        run.process.kill()
        pytest.skip("the part is beside the driver: a lost head is the end of the cluster")
    for pid in (raylet, lost):
        os.kill(pid, signal.SIGKILL)
    assert run.end() == 0, run.text
    assert victim.replace("-", "/") in [event.who for event in events(run.directory, "restart")]
    check_whole(run.directory)
    check_nothing_left(nodes)


def test_ranks_survive_the_death_of_one_of_them_and_of_its_node(nodes: Cluster, model: Path, tmp_path: Path) -> None:
    nodes.add_node(**NODE)  # there is another place
    run = Run(tmp_path / "run", model, cluster__address=nodes.address, save_steps=2, **RANKS)
    run.until(lambda: count(run.directory, "checkpoint") >= 1)
    first = ranks_of(run)
    assert len({parent(pid) for pid in first}) == 2, "two ranks have the same raylet"
    os.kill(first[1], signal.SIGKILL)
    run.until(lambda: len(ranks_of(run)) == 2 and not {*ranks_of(run)} & {*first})
    assert gone(first, 10.0), "a rank outlives the others"
    run.until(lambda: count(run.directory, "checkpoint") >= 2)
    head = nodes.head_node.all_processes["raylet"][0].process.pid
    lost = next(pid for pid in ranks_of(run) if parent(pid) != head)
    for pid in (parent(lost), lost):
        os.kill(pid, signal.SIGKILL)
    assert run.end() == 0, run.text
    assert [event.who for event in events(run.directory, "up")].count("trainer") >= 2, "it came back twice"
    check_whole(run.directory)
    check_nothing_left(nodes)


def ranks_of(run: Run) -> list[int]:
    return [pid for name, pid in sorted(run.parts().items()) if name.startswith("trainer-")]


@pytest.mark.parametrize(
    ("mapped", "how"),
    [({}, signal.SIGKILL), (RANKS, signal.SIGKILL), (RANKS, signal.SIGTERM)],
    ids=["one trainer", "ranks", "ranks, asked to stop"],
)
def test_a_driver_that_was_killed_leaves_nothing_and_goes_on(
    nodes: Cluster, model: Path, tmp_path: Path, mapped: dict[str, Any], how: signal.Signals
) -> None:
    run = Run(tmp_path / "run", model, cluster__address=nodes.address, **mapped)
    run.until(lambda: count(run.directory, "step.end") >= 3)
    parts = list(run.parts().values())
    assert len(parts) == 3
    run.process.send_signal(how)
    assert run.end() == (75 if how == signal.SIGTERM else -signal.SIGKILL), run.text
    assert gone(parts, 15.0), "actors outlive their driver"
    check_nothing_left(nodes)
    again = Run(tmp_path / "run", model, env={"RAY_ADDRESS": nodes.address}, **mapped)
    assert again.end() == 0, again.text
    check_whole(run.directory)


def raylets() -> set[int]:
    """Every process of any Ray on this machine."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"/ray/" in line or line.startswith(b"ray::"):
            found.add(int(entry.name))
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_cluster_of_our_own_ends_with_the_run(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    before = raylets()
    run = Run(tmp_path / "run", model, cluster__address="local", max_steps=500)
    run.until(lambda: count(run.directory, "step.end") >= 2)
    ours, parts = raylets() - before, list(run.parts().values())
    assert len(ours) >= 5 and len(parts) == 3, "gcs, raylet and three parts"
    run.process.send_signal(how)
    assert run.end(60) == (75 if how == signal.SIGTERM else -signal.SIGKILL), run.text
    assert gone(parts, 5.0)
    assert gone(list(ours), 90.0), f"left behind: {sorted(raylets() & ours)}"  # Ray's agents look around at leisure
    audit(run.directory)


def test_a_gpu_is_seen_by_who_was_given_it(tmp_path: Path) -> None:
    """With nodes that only say that they have GPUs: Ray numbers them, and no card is opened."""
    head = {**NODE, "num_cpus": 4, "num_gpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE, num_gpus=1)
    cluster.wait_for_nodes()

    async def scenario() -> None:
        there = RayCluster(address=cluster.address, timeout_s=60)
        there.plan(
            {
                "trainer/0": ResourceRequest(node=0, cpus=1, gpus=0.5, device=0),
                "trainer/1": ResourceRequest(node=0, cpus=1, gpus=0.5, device=1),
                "engine/0": ResourceRequest(node=0, cpus=1, gpus=0.5, device=0),
                "engine/1": ResourceRequest(node=0, cpus=1, gpus=0.5, device=1),
                "engine/2": ResourceRequest(node=1, cpus=1, gpus=1, device=2),
            }
        )
        peers = [
            await there.start(ChildSpec(name=name, target="tests.processes.targets:service")) for name in there.requests
        ]
        seen = [await peer.call("variable", "CUDA_VISIBLE_DEVICES") for peer in peers]
        nodes = [parent(peer.pid) for peer in peers]  # type: ignore[attr-defined]
        assert len(set(nodes[:4])) == 1 and nodes[4] != nodes[0]
        assert seen[0] == seen[2] != seen[1] == seen[3], "a rank and the engine on its device have one GPU"
        assert all(len(one.split(",")) == 1 and one for one in seen)
        for peer in peers:
            await peer.close()
        await there.close()

    try:
        asyncio.run(scenario())
    finally:
        ray.shutdown()
        cluster.shutdown()
