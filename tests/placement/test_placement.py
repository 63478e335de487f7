"""Who gets which cores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.config import load_config
from headway.errors import ConfigError
from headway.launch.components import ComponentArgs
from headway.launch.language_components import _make_local_settings
from headway.placement.component_places import count_memory_share, share_a_card
from headway.placement.machine import Machine
from headway.placement.placement import Placement, make_visible_devices_env, plan_placement

THREADS = "strategy_args.strategy_config.num_threads"


@pytest.mark.parametrize(
    ("cores", "options", "expected"),
    [
        (2, {"async_generation_ratio": 1}, (2, 2, 1)),
        (4, {"async_generation_ratio": 1}, (4, 4, 1)),
        (6, {"async_generation_ratio": 1}, (3, 3, 1)),
        (1, {"async_generation_ratio": 1}, (1, 1, 1)),
        (8, {"async_generation_ratio": 1}, (4, 4, 1)),
        (8, {"async_generation_ratio": 0}, (8, 8, 1)),
        (8, {"async_generation_ratio": 1, "hybrid_engine": True}, (8, 8, 1)),
        (8, {"async_generation_ratio": 1, f"actor_train.{THREADS}": 2, f"actor_infer.{THREADS}": 3}, (2, 3, 1)),
        (
            8,
            {"async_generation_ratio": 1, "actor_train.device_mapping": [0], "actor_infer.device_mapping": [1, 2]},
            (4, 2, 2),
        ),
    ],
)
def test_cores_are_shared_out(cores: int, options: dict[str, Any], expected: tuple[int, int, int]) -> None:
    resolved = load_config({"device": "cpu", "allow_uncorrected_async": True, **options})
    made = plan_placement(resolved, Machine(cores=cores, gpus=0))
    assert (made.train_threads, made.infer_threads, made.replicas) == expected
    assert made.processes


def test_processes_can_be_refused_and_a_gpu_must_be_there() -> None:
    machine = Machine(cores=2, gpus=0)
    assert not plan_placement(load_config({"processes": False, "device": "cpu"}), machine).processes
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        plan_placement(load_config({"device": "cuda"}), machine)


APART = {"actor_train.device_mapping": [0], "actor_infer.device_mapping": [1, 2], "async_generation_ratio": 1}


def on_gpus(count: int, **options: Any) -> Placement:
    resolved = load_config({"allow_uncorrected_async": True, **APART, **options})
    return plan_placement(resolved, Machine(cores=8, gpus=count))


def test_parts_that_are_mapped_apart_are_processes_with_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = on_gpus(4)
    assert (
        made.processes
        and made.replicas == 2
        and {"trainer": 0, "engine/0": 1, "engine/1": 2}.items() <= (made.gpus.items())
    )
    assert make_visible_devices_env(made, "engine/1") == {"CUDA_VISIBLE_DEVICES": "2"} and "engine 1–2" in made.summary
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert make_visible_devices_env(made, "trainer") == {"CUDA_VISIBLE_DEVICES": "4"}
    assert make_visible_devices_env(made, "engine/1") == {"CUDA_VISIBLE_DEVICES": "6"}


def test_one_gpu_is_shared_by_threads() -> None:
    made = on_gpus(1)
    assert not made.processes and not made.gpus and make_visible_devices_env(made, "trainer") == {}
    assert not on_gpus(4, processes=False).gpus


def test_a_configuration_for_more_devices_keeps_its_pools_apart_on_fewer() -> None:
    made = on_gpus(2)
    assert (made.ranks, made.replicas) == (1, 1) and made.places["engine/0"].devices == (1,)
    assert any("is for 3 devices and there are 2 here" in note for note in made.notes)


def test_parallel_sizes_of_our_own_engines_are_said_to_have_no_effect() -> None:
    options = {"actor_infer.strategy_args.strategy_config.tensor_parallel_size": 2}
    assert on_gpus(4, **options).replicas == 2
    resolved = load_config({"allow_uncorrected_async": True, **APART, **options})
    assert any("holds the whole model on one device: 2 engines" in note for note in resolved.notes)


def share(gpus: int, **options: Any) -> Placement:
    return plan_placement(load_config({"allow_uncorrected_async": True, **options}), Machine(cores=8, gpus=gpus))


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_logical_devices_share_the_cards_that_there_are(kind: str) -> None:
    options = {"async_generation_ratio": 1, "devices": {"kind": kind, "count": 4, "physical": 1}}
    mapped = {"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": [2, 3]}
    made = share(1, **options, **mapped)
    assert (made.device, made.processes, made.ranks, made.replicas) == (kind, True, 2, 2)
    assert [made.places[name].devices for name in ("trainer/0", "trainer/1", "engine/0", "engine/1")] == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]
    assert {place.cards for place in made.places.values()} == {(0,)} and made.machine.is_virtual
    split = share(1, **options, hybrid_engine=False)
    assert split.places == made.places, "half trains and half generates where nothing is mapped"
    assert not made.idle_cards


def test_logical_devices_of_a_cpu_share_the_cores_that_are_named() -> None:
    options = {"async_generation_ratio": 1, "devices": {"kind": "cpu", "count": 6, "physical": 2}}
    made = share(0, **options, **{"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": [2, 3, 4, 5]})
    assert (made.ranks, made.replicas, made.machine.cores, made.infer_threads) == (2, 4, 2, 1)
    assert share(0, devices={"kind": "cpu", "count": 2, "physical": 4}).machine.cores == 4
    with pytest.raises(ConfigError, match="this machine has 8 cores"):
        share(0, devices={"kind": "cpu", "count": 16, "physical": 9})


def test_hybrid_roles_take_turns_and_others_have_devices_of_their_own() -> None:
    on_all = share(4, num_gpus_per_node=4, hybrid_engine=True)
    assert (on_all.ranks, on_all.replicas) == (4, 4)
    assert on_all.places["engine/2"].sharing == "turns" and on_all.places["engine/2"].partners == ("trainer/2",)
    assert {name: gpu for name, gpu in on_all.gpus.items() if name.startswith("engine/")} == {
        f"engine/{number}": number for number in range(4)
    }
    ahead = share(4, num_gpus_per_node=2, async_generation_ratio=1)
    assert ahead.places["engine/0"].sharing == "alone" and ahead.idle_cards == (2, 3)
    assert "no devices are named: 1 of 2 train and 1 generate" in ahead.notes[0]
    both = share(2, num_gpus_per_node=2, async_generation_ratio=1, hybrid_engine=True)
    assert both.places["engine/1"].sharing == "turns"
    assert any("generation stops during a step" in note for note in both.notes), "α > 0 in turns is said to gain little"


def plan_model(model: str, gpus: int = 8, **options: Any) -> Placement:
    resolved = load_config({"allow_uncorrected_async": True, "pretrain": model, **options})
    return plan_placement(resolved, Machine(cores=64, gpus=gpus, gpu_memory_gib=80.0))


EIGHT = {"actor_train.device_mapping": [0, 1, 2, 3], "actor_infer.device_mapping": [4, 5, 6, 7]}


def test_engines_have_a_second_set_of_weights_where_there_is_room() -> None:
    ahead = {"async_generation_ratio": 1, **EIGHT}
    assert plan_model("Qwen/Qwen2.5-7B", **ahead).places["engine/0"].weight_sets == 2
    tight = plan_model("Qwen/Qwen2.5-14B", **ahead)
    assert tight.places["engine/0"].weight_sets == 1
    assert any("engines stop while a version arrives" in note for note in tight.notes)
    assert plan_model("Qwen/Qwen2.5-7B", **ahead, enable_dual_buffer=False).places["engine/0"].weight_sets == 1
    assert plan_model("Qwen/Qwen2.5-7B").places["engine/0"].weight_sets == 2, "those that take turns, too"
    assert plan_model("Qwen/Qwen2.5-14B").places["engine/0"].weight_sets == 1


def test_one_version_stays_on_the_cards_where_engines_wait_for_it_and_three_elsewhere() -> None:
    waits, ahead = (plan_model("Qwen/Qwen2.5-7B", async_generation_ratio=α, hybrid_engine=True) for α in (0, 1))
    assert (waits.transport.kind, waits.transport.buffers) == ("cuda_ipc", 1)
    assert not any(place.sleeps for name, place in waits.places.items() if name.startswith("trainer"))
    assert (ahead.transport.kind, ahead.transport.buffers) == ("cuda_ipc", 3)


def test_a_share_of_the_card_that_is_too_small_is_named_with_one_that_is_not() -> None:
    share_key = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"
    with pytest.raises(ConfigError, match=r"gives an engine 12.0 GiB of a card.* \(at least 0.18: there is room\)"):
        plan_model("Qwen/Qwen2.5-7B", **{share_key: 0.15})
    assert plan_model("Qwen/Qwen2.5-7B", **{share_key: 0.18}).budget


def test_moments_stay_on_the_card_where_moving_them_gives_room_for_no_sequence() -> None:
    adapters = {"actor_train.model_args.lora_rank": 16, "response_length": 7168, "rollout_batch_size": 512}
    made = plan_model("Qwen/Qwen3-30B-A3B", **adapters)
    assert made.budget is not None and made.budget.engines_sleep and not made.budget.offloads


def test_fewer_samples_are_computed_at_once_where_a_step_would_not_fit() -> None:
    key, sizes = "actor_train.training_args.per_device_train_batch_size", {"rollout_batch_size": 64}
    made = plan_model("Qwen/Qwen3-8B", **{**sizes, "response_length": 1024, key: 32})
    assert 1 <= made.micro_batch < 32 and any(note.startswith("per_device_train_batch_size: ") for note in made.notes)
    assert made.budget is not None and max(made.budget.peaks_gib.values()) <= 76.0
    assert plan_model("Qwen/Qwen3-8B", **{**sizes, "response_length": 1024, key: 2}).micro_batch == 0
    resolved = load_config({"response_length": 96, "prompt_length": 32, key: 4})
    given = {"config": resolved.changed(), "model": "", "critic": None, "device": "cpu", "threads": 1}
    settings = [_make_local_settings(ComponentArgs(**given, micro_batch=micro)) for micro in (0, 2)]
    assert [one.micro_batch_tokens for one in settings] == [4 * 128, 2 * 128]
    assert replace(settings[0], micro_batch_tokens=1) == replace(settings[1], micro_batch_tokens=1)


def test_moments_leave_a_card_on_which_a_step_would_not_fit_unless_that_is_forbidden() -> None:
    key = "actor_train.training_args.offload_optimizer"
    made = plan_model("Qwen/Qwen3-4B", **{**EIGHT, "response_length": 31744, "actor_train.device_mapping": [0]})
    assert made.places["trainer"].sleeps and any("lives in the memory of the host" in note for note in made.notes)
    with pytest.raises(ConfigError, match="offload_optimizer: true"):
        plan_model(
            "Qwen/Qwen3-4B", **{**EIGHT, "response_length": 31744, "actor_train.device_mapping": [0], key: False}
        )


def test_pools_that_shrink_have_ranks_that_divide_those_before_and_one_judge_a_device() -> None:
    judged = {
        "rewards": {"judge": {"model_args": {"model_name_or_path": "Qwen/Qwen2.5-7B"}, "device_mapping": [12, 13]}}
    }
    pools = {"actor_train.device_mapping": list(range(8)), "actor_infer.device_mapping": list(range(8, 12))}
    made = plan_model("Qwen/Qwen2.5-0.5B", gpus=7, **pools, **judged)
    assert (made.ranks, made.replicas) == (4, 2)
    assert made.list_reward_components("judge") == ["reward/judge"]
    cache = made.places["reward/judge"].kv_cache_bytes
    assert cache is not None and cache > 10 << 30, "a judge alone on its card has a large cache"


def test_devices_of_a_critic_beyond_the_first_are_said_to_be_unused() -> None:
    critic = {**EIGHT, "adv_estimator": "gae", "actor_infer.device_mapping": [4, 5], "critic.device_mapping": [6, 7]}
    made = plan_model("Qwen/Qwen2.5-0.5B", **critic)
    assert any(note.startswith("critic: one process, on device 6; device 7 is") for note in made.notes)
    assert made.budget is not None
    alone, parameters = made.budget.needs["critic"], 0.494e9
    assert alone["critic"] == pytest.approx(18 * parameters, rel=0.01), "all of it is on its card"
    within = plan_model("Qwen/Qwen2.5-0.5B", **{**critic, "critic.device_mapping": [0, 1, 2, 3]}).budget
    assert within is not None and within.needs["trainer/3"]["critic"] == pytest.approx(16 * parameters / 4, rel=0.01)
    with pytest.raises(ConfigError, match="cut over the devices of actor_train"):
        plan_model("Qwen/Qwen2.5-7B", **critic)


def test_engines_read_versions_from_the_rank_on_their_own_device() -> None:
    made = share(4, num_gpus_per_node=4, hybrid_engine=True)
    assert made.transport.kind == "cuda_ipc" and made.transport.publishers == (0, 1, 2, 3)
    assert made.transport.sources == {f"engine/{number}": number for number in range(4)}
    assert make_visible_devices_env(made, "engine/3") == {"CUDA_VISIBLE_DEVICES": "3"}, "it needs no other GPU"
    more = {"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": [0, 1, 2, 3], "hybrid_engine": True}
    some = share(4, **more)
    assert some.transport.sources == {"engine/0": 0, "engine/1": 1, "engine/2": 0, "engine/3": 0}
    assert make_visible_devices_env(some, "engine/2") == {"CUDA_VISIBLE_DEVICES": "2,0"}
    virtual = share(2, devices={"count": 4, "physical": 2}, **more)
    assert virtual.transport.sources == {"engine/0": 0, "engine/1": 1, "engine/2": 0, "engine/3": 0}
    apart = {"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": [2, 3]}
    decoupled = share(4, **apart)
    assert (decoupled.transport.kind, decoupled.transport.publishers) == ("shared_memory", (0,))
    on_cpu = share(0, devices={"kind": "cpu", "count": 2}, hybrid_engine=True)
    assert on_cpu.transport.kind == "cuda_ipc", "logical devices of a CPU run the code of GPUs"
    assert share(0, hybrid_engine=True, processes=True).transport.kind == "shared_memory"


def test_ranks_on_one_gpu_do_not_meet_through_nccl_and_share_its_memory() -> None:
    apart = {"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": [2, 3]}
    ranks = ("trainer/0", "trainer/1")
    assert not share_a_card(share(4, **apart).places, ranks)
    virtual = share(1, devices={"count": 4, "physical": 1}, **apart)
    assert share_a_card(virtual.places, ranks)
    assert count_memory_share(virtual.places, virtual.machine, "engine/0") <= 0.25
    hybrid = share(1, devices={"count": 2, "physical": 1}, hybrid_engine=True)
    assert count_memory_share(hybrid.places, hybrid.machine, "engine/1") <= 0.5


def test_logical_devices_are_spread_over_cards_in_order() -> None:
    machine = Machine(cores=8, gpus=2, gpu_memory_gib=80, logical_devices=5, nodes=2)
    assert [machine.locate(device) for device in range(10)] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert machine.device_memory_gib == pytest.approx(80 / 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": {"count": 2, "physical": 3}}, "more cards than the 2 devices"),
        ({"devices": {"count": 8, "physical": 5}}, "this machine has 4 GPUs"),
        ({"devices": {"kind": "cpu"}, "device": "cuda"}, "keep one of them"),
        ({"devices": {"count": 2}, "num_gpus_per_node": 8}, "num_gpus_per_node = 8"),
    ],
)
def test_devices_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share(4, **options)
