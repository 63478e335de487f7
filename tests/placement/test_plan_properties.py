"""Every plan of a node uses or names each card, gives each role a device and stays within each card's memory."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headway.config import ConfigErrors, ResolvedConfig, load_config
from headway.errors import ConfigError
from headway.placement.device_pools import shrink_pools
from headway.placement.machine import Machine
from headway.placement.placement import Placement, plan_on_machine
from headway.placement.plan_table import describe_plan

PLANS = 520
INFER, TRAIN = "actor_infer.strategy_args.strategy_config", "actor_train.strategy_args.strategy_config"
MODELS = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-14B",
    "no-such-model",
)


def draw_devices(rng: random.Random) -> dict[str, Any]:
    """What users say about devices: nothing, numbers, shares or mappings."""
    kind = rng.choice(("nothing", "number", "shares", "apart", "same", "partly", "one role"))
    total = rng.choice((1, 2, 3, 4, 6, 8, 16, 24))
    if kind == "nothing":
        return {}
    if kind == "number":
        return {"num_gpus_per_node": total}
    if kind == "shares":
        given = {"use_nodes_ratios": rng.choice(([0.5, 0.125, 0.125, 0.25], [0.5, 0.5, 0.5, 0.5], [1, 1, 1, 1]))}
        return given | ({"num_gpus_per_node": total} if rng.random() < 0.5 else {})
    cut = rng.randint(1, max(1, total - 1))
    train, rest = list(range(cut)), list(range(cut, total)) or [cut]
    if kind == "one role":
        return {rng.choice(("actor_train", "actor_infer")) + ".device_mapping": train}
    infer = {"apart": rest, "same": train, "partly": list(range(cut // 2, total))}[kind]
    given = {"actor_train.device_mapping": train, "actor_infer.device_mapping": infer}
    if rng.random() < 0.4:
        given["reference.device_mapping"] = rng.choice((train, [total], [total, total + 1]))
    return given


def draw_config(rng: random.Random) -> dict[str, Any]:
    alpha = rng.choice((0, 0, 1, 2))
    given: dict[str, Any] = {
        "pretrain": rng.choice(MODELS),
        "async_generation_ratio": alpha,
        "allow_uncorrected_async": True,
        "rollout_batch_size": 48,
        "num_return_sequences_in_group": rng.choice((4, 8)),
        "prompt_length": 1024,
        "response_length": rng.choice((1024, 7168, 31744)),
        "use_kl_loss": rng.random() < 0.4,
        f"{INFER}.gpu_memory_utilization": rng.choice((0.5, 0.8, 0.9)),
        f"{TRAIN}.tensor_model_parallel_size": rng.choice((1, 1, 1, 2, 3)),
        f"{TRAIN}.pipeline_model_parallel_size": rng.choice((1, 1, 2)),
        f"{TRAIN}.context_parallel_size": rng.choice((1, 1, 2)),
        f"{INFER}.tensor_model_parallel_size": rng.choice((1, 1, 2)),
        "adv_estimator": rng.choice(("grpo", "grpo", "gae")),
        **draw_devices(rng),
    }
    if rng.random() < 0.4:
        given["hybrid_engine"] = rng.random() < 0.5
    if rng.random() < 0.15:
        given["processes"] = rng.random() < 0.5
    if rng.random() < 0.2:
        given["devices"] = {"count": rng.choice((2, 4, 8)), "physical": 1}
    return given


def draw_machine(rng: random.Random) -> Machine:
    gpus = rng.choice((0, 1, 2, 3, 4, 8, 8))
    memory = rng.choice((24.0, 80.0, 80.0, 141.0))
    return Machine(cores=rng.choice((2, 16, 64)), gpus=gpus, gpu_memory_gib=memory, nodes=rng.choice((1, 1, 1, 2)))


def check_plan(resolved: ResolvedConfig, machine: Machine, made: Placement) -> None:
    lines = describe_plan(resolved, made)
    assert max(map(len, lines)) <= 80
    names = ["trainer"] if made.ranks == 1 else [f"trainer/{rank}" for rank in range(made.ranks)]
    engines = [f"engine/{number}" for number in range(made.replicas)]
    assert names == [name for name in made.places if name.startswith("trainer")]
    assert engines == [name for name in made.places if name.startswith("engine/")]
    for name, place in made.places.items():
        assert place.devices, f"{name} has no device"
        assert place.sharing == ("alone" if not place.partners else place.sharing), name
    if made.device == "cpu":
        return
    used = {card for place in made.places.values() for card in place.cards}
    assert used | set(made.idle_cards) == set(range(made.machine.gpus * made.machine.nodes))
    assert not made.idle_cards or any(line.startswith("idle") for line in lines)
    assert all(card < made.machine.gpus * made.machine.nodes for card in used)
    if made.processes and made.machine.devices * made.machine.nodes > 1:
        devices = [place.devices for name, place in made.places.items() if name.startswith(("trainer", "engine/"))]
        assert all(len(pool) == 1 for pool in devices), "one rank and one engine a device"
        for kind in ("trainer", "engine/"):
            own = [place.devices for name, place in made.places.items() if name.startswith(kind)]
            assert len(set(own)) == len(own), "no two ranks and no two engines have one device"
    if made.budget is not None:
        assert max(made.budget.peaks_gib.values()) <= machine.gpu_memory_gib
        assert made.budget.sequences >= 1


@pytest.fixture(scope="module")
def outcomes() -> dict[str, int]:
    """Plan everything once, check each plan, and count how it went."""
    counts = {"refused by the configuration": 0, "does not fit": 0, "planned": 0}
    for seed in range(8 * PLANS):
        if counts["planned"] == PLANS:
            break
        rng = random.Random(seed)
        given, machine = draw_config(rng), draw_machine(rng)
        try:
            resolved = load_config(given)
        except ConfigErrors:
            counts["refused by the configuration"] += 1
            continue
        try:
            made = plan_on_machine(resolved, machine)
        except ConfigError as error:
            assert error.hint, f"{error} says nothing about what would fit"
            assert "\n" not in str(error)
            counts["does not fit"] += 1
            continue
        try:
            check_plan(resolved, machine, made)
            assert made == plan_on_machine(resolved, machine), "the same input gives the same plan"
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {given} on {machine}: {made.places}") from error
        counts["planned"] += 1
    return counts


def test_hundreds_of_random_plans_hold(outcomes: dict[str, int]) -> None:
    assert outcomes["planned"] >= 500
    assert outcomes["does not fit"] > 20, "large models on small cards are among them"


@pytest.mark.parametrize("seed", range(200))
def test_pools_that_shrink_keep_every_role_and_stay_apart_while_they_can(seed: int) -> None:
    rng = random.Random(seed)
    total = rng.randint(2, 40)
    cut, end = sorted((rng.randint(1, total - 1), rng.randint(1, total)))
    pools = {"actor_train": tuple(range(cut)), "actor_infer": tuple(range(cut, total)), "reference": tuple(range(end))}
    there = rng.randint(1, total)
    fitted = shrink_pools(pools, there)
    assert all(fitted.values()) and {device for pool in fitted.values() for device in pool} == set(range(there))
    if there >= 2:
        assert not set(fitted["actor_train"]) & set(fitted["actor_infer"])
