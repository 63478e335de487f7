"""Resources of the components of a run on a cluster."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Literal

import pytest

from headway.cluster.ray.ray_session import ClusterNode, ResourceRequest, group_for_reservation
from headway.config import ConfigErrors, load_config
from headway.errors import ConfigError
from headway.placement.memory_needs import estimate_component_needs
from headway.placement.placement import Placement, plan_on_machine, plan_placement
from headway.placement.ray_resources import make_cluster_machine, make_resource_requests, select_cluster_device

THREADS = "strategy_args.strategy_config.num_threads"
SERVER = [
    "actor_infer.strategy_args.strategy_name=vllm",
    "actor_infer.strategy_args.strategy_config.url=[http://127.0.0.1:1]",
]
APART: dict[str, Any] = {
    "async_generation_ratio": 1,
    "num_gpus_per_node": 2,
    "actor_train.device_mapping": [0],
    "actor_infer.device_mapping": [1, 2, 3],
}


def plan(nodes: list[ClusterNode], **options: Any) -> Placement:
    """Plan on a cluster that nobody has to start."""
    resolved = load_config({"cluster": {"kind": "ray"}}, [f"{key}={value}" for key, value in options.items()])
    return plan_on_machine(resolved, make_cluster_machine(resolved, nodes))


def make_nodes(*gpus: int, memory: float = 0.0) -> list[ClusterNode]:
    return [ClusterNode(name=str(n), cpus=64, gpus=count, gpu_memory_gib=memory) for n, count in enumerate(gpus)]


def requests(device: Literal["cpu", "cuda"], **options: Any) -> dict[str, ResourceRequest]:
    resolved = load_config({"cluster": {"kind": "ray"}}, [f"{key}={value}" for key, value in options.items()])
    made = plan(make_nodes(*((2, 2) if device == "cuda" else (0,))), **options)
    found = make_resource_requests(resolved, made.places, device)
    assert {name: request.device for name, request in found.items()} == {
        name: made.places[name].devices[0] if device == "cuda" else None for name in found
    }
    return {name: replace(request, device=None) for name, request in found.items()}


def test_a_device_is_a_slot_of_the_node_that_its_number_says() -> None:
    assert requests("cpu", **APART) == {
        "trainer": ResourceRequest(node=0, cpus=1),
        "engine/0": ResourceRequest(node=0, cpus=1),
        "engine/1": ResourceRequest(node=1, cpus=1),
        "engine/2": ResourceRequest(node=1, cpus=1),
    }
    more = requests("cpu", **APART, **{f"actor_infer.{THREADS}": 4})
    assert (more["trainer"].cpus, more["engine/2"].cpus) == (1, 4)


def test_shares_of_all_devices_are_slots_too() -> None:
    ratios = {"use_nodes_ratios": "[0.5,0.125,0.125,0.25]", "num_gpus_per_node": 4, "num_nodes": 2}
    found = requests("cpu", async_generation_ratio=1, pg_variant="decoupled_ppo", use_kl_loss="true", **ratios)
    assert found == {
        "trainer": ResourceRequest(node=0, cpus=4),
        "engine/0": ResourceRequest(node=1, cpus=1),
        "engine/1": ResourceRequest(node=1, cpus=1),
        "logp": ResourceRequest(node=1, cpus=1),
        "reference": ResourceRequest(node=1, cpus=1),
    }


def test_on_gpus_everybody_has_one_and_who_shares_has_a_part_of_it() -> None:
    assert requests("cuda", **APART)["engine/1"] == ResourceRequest(node=1, cpus=1, gpus=1.0)
    shared = requests("cuda", async_generation_ratio=1, num_gpus_per_node=1)
    assert shared == {
        "trainer": ResourceRequest(node=0, cpus=1, gpus=0.5),
        "engine/0": ResourceRequest(node=0, cpus=1, gpus=0.5),
    }
    shared_model = {"actor_infer.strategy_args.strategy_config.tensor_model_parallel_size": 3}
    assert requests("cuda", **APART, **shared_model) == requests("cuda", **APART), "each of our engines has one GPU"


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0.0), ("cuda", 1.0)])
def test_ranks_of_a_trainer_are_on_the_nodes_of_their_devices(device: Literal["cpu", "cuda"], gpus: float) -> None:
    found = requests(device, **{**APART, "actor_train.device_mapping": [1, 2], "actor_infer.device_mapping": [0, 3]})
    assert found == {
        "trainer/0": ResourceRequest(node=0, cpus=1, gpus=gpus),
        "trainer/1": ResourceRequest(node=1, cpus=1, gpus=gpus),
        "engine/0": ResourceRequest(node=0, cpus=1, gpus=gpus),
        "engine/1": ResourceRequest(node=1, cpus=1, gpus=gpus),
    }


def test_on_gpus_ranks_share_with_engines_where_nothing_else_is_said() -> None:
    shared = requests("cuda", num_gpus_per_node=2)
    assert shared == {
        name: ResourceRequest(node=0, cpus=1, gpus=0.5) for name in ("trainer/0", "trainer/1", "engine/0", "engine/1")
    }


def test_sizes_make_ranks_of_slots_that_nobody_mapped() -> None:
    sizes = {"actor_train.strategy_args.strategy_config.context_parallel_size": 2}
    found = requests("cpu", **sizes, num_gpus_per_node=4)
    assert {name: request for name, request in found.items() if name.startswith("trainer")} == {
        "trainer/0": ResourceRequest(node=0, cpus=2),
        "trainer/1": ResourceRequest(node=0, cpus=2),
    }


def test_a_run_on_ray_is_planned_like_one_on_a_node() -> None:
    pools = {"actor_train.device_mapping": list(range(16)), "actor_infer.device_mapping": list(range(16, 24))}
    options = {"async_generation_ratio": 1, "allow_uncorrected_async": "true", "pretrain": "Qwen/Qwen2.5-7B", **pools}
    made = plan(make_nodes(8, 8, memory=80.0), **options)
    assert (made.ranks, made.replicas, made.machine.nodes) == (8, 8, 2), "pools for 24 GPUs are fitted to 16"
    assert made.budget is not None and made.budget.sequences > 0 and made.gpus == {}
    assert made.transport.kind == "object_store"
    smaller = plan(make_nodes(4, 4, 4, memory=80.0), **options)
    assert (smaller.machine.gpus, smaller.machine.nodes) == (4, 3), "machines with fewer GPUs than a node of the file"
    everything = plan(make_nodes(0, 8, 8), device="cuda")
    assert (everything.ranks, everything.replicas) == (16, 16), "nothing is said: trainer and engines have all"
    with pytest.raises(ConfigError, match="a step of trainer"):
        plan(make_nodes(1, memory=22.0), pretrain="Qwen/Qwen2.5-7B", device="cuda")


def test_who_shares_a_gpu_is_in_one_bundle() -> None:
    made = plan(make_nodes(2, 2), num_gpus_per_node=2, num_nodes=2, device="cuda")
    resolved = load_config({"cluster": {"kind": "ray"}})
    groups = group_for_reservation(make_resource_requests(resolved, made.places, "cuda"))
    assert [(group.strategy, list(group.bundles)) for group in groups] == [
        ("STRICT_PACK", [(0, 0), (0, 1)]),
        ("STRICT_PACK", [(1, 2), (1, 3)]),
    ]
    assert all(bundle == {"CPU": 2.0, "GPU": 1.0} for group in groups for bundle in group.bundles.values())
    on_cpu = group_for_reservation({"a": ResourceRequest(node=0, cpus=1), "b": ResourceRequest(node=1, cpus=2)})
    assert [(group.strategy, list(group.bundles)) for group in on_cpu] == [("SPREAD", [(0, None), (1, None)])]


def test_gpus_are_used_where_the_cluster_has_them() -> None:
    with_gpus, without = [ClusterNode(name="a", cpus=8, gpus=2)], [ClusterNode(name="b", cpus=8, gpus=0)]
    auto, cuda, cpu = (
        load_config({"cluster": {"kind": "ray"}, "device": device}) for device in ("auto", "cuda", "cpu")
    )
    assert [select_cluster_device(one, with_gpus) for one in (auto, cuda, cpu)] == ["cuda", "cuda", "cpu"]
    assert select_cluster_device(auto, without) == "cpu"
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU"):
        select_cluster_device(cuda, without)


def test_a_cluster_of_our_own_is_planned_and_not_started() -> None:
    pytest.importorskip("ray")
    import ray

    resolved = load_config({"cluster": {"kind": "ray", "address": "local"}, "device": "cpu"}, _words(APART))
    made = plan_placement(resolved)
    assert made.processes and made.replicas == 3 and made.cluster is not None and not ray.is_initialized()
    assert "on Ray at local, 1 machine: this machine" in made.summary and "engine/2 on 1 (1 CPU)" in made.summary
    parts = [(part.name, part.lives, part.memory) for part in estimate_component_needs(resolved, made)]
    assert parts[0] == ("trainer", "actor", "node 0") and parts[-1] == ("engine/2", "actor", "node 1")


def test_ranks_on_a_cluster_are_shown_with_devices_nodes_and_layout() -> None:
    pytest.importorskip("ray")
    ranked = {
        **APART,
        "actor_train.device_mapping": [0, 1, 2, 3],
        "actor_infer.device_mapping": [4],
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2,
    }
    resolved = load_config({"cluster": {"kind": "ray", "address": "local"}, "device": "cpu"}, _words(ranked))
    made = plan_placement(resolved)
    assert (made.ranks, made.train_threads) == (4, 1)
    assert "4 ranks of the trainer: data 2 × tensor 2, weights in 2 shards" in made.summary
    assert made.layout.sizes == {"ranks": 4, "data": 2, "context": 1, "tensor": 2, "shards": 2}
    shown = [
        (part.name, part.memory, part.rank and part.rank.summary) for part in estimate_component_needs(resolved, made)
    ]
    assert shown[1:3] == [
        ("trainer/1", "node 0", "device 1: data 0, context 0, tensor 1"),
        ("trainer/2", "node 1", "device 2: data 1, context 0, tensor 0"),
    ]
    assert shown[-1] == ("engine/0", "node 2", None)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed.*ray"):
        plan_placement(load_config({"cluster": {"kind": "ray"}}))


@pytest.mark.parametrize(
    ("words", "key", "problem"),
    [
        (["cluster.address=auto"], "cluster.address", "read only by cluster.kind: ray"),
        (["weight_transfer.transport=object_store"], "weight_transfer.transport", "cluster.kind is local"),
        (["cluster.kind=ray", "processes=false"], "processes", "on Ray are processes"),
        (
            ["cluster.kind=ray", "weight_transfer.transport=shared_memory"],
            "weight_transfer.transport",
            "does not reach",
        ),
        (["cluster.kind=ray", *SERVER], "cluster.kind", "servers are not started on Ray"),
    ],
)
def test_what_contradicts_a_cluster_is_refused(words: list[str], key: str, problem: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_config(None, words)
    assert [one for one in caught.value.problems if one.key == key and problem in str(one)]


def _words(options: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in options.items()]
