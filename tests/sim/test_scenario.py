"""From configuration to scenario: devices, replicas and costs."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import load_config
from headway.sim.simulated_run import Scenario, make_scenario

SPLIT = {
    "actor_train": {"device_mapping": [0, 1]},
    "actor_infer": {"device_mapping": [2, 3, 4, 5]},
    "async_generation_ratio": 1,
}


def scenario(**options: Any) -> Scenario:
    return make_scenario(load_config({"rollout_batch_size": 8, **options}))


def test_the_run_ends_after_the_simulated_steps() -> None:
    assert scenario(max_steps=500, simulation={"steps": 4}).settings.max_steps == 4


def test_split_pools_keep_their_devices() -> None:
    made = scenario(**SPLIT)
    assert (made.train_devices, made.infer_devices, made.engines) == ((0, 1), (2, 3, 4, 5), 4)


def test_a_hybrid_run_has_one_pool() -> None:
    made = scenario(hybrid_engine=True, num_gpus_per_node=4)
    assert made.train_devices == made.infer_devices == (0, 1, 2, 3)


@pytest.mark.parametrize(("simulation", "engines"), [({}, 2), ({"engine": {"gpus": 4}}, 1)])
def test_replicas_are_as_large_as_the_parallel_sizes_unless_the_block_says_otherwise(
    simulation: dict[str, Any], engines: int
) -> None:
    parallel = {"strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2}}}
    infer = {**SPLIT["actor_infer"], **parallel}  # type: ignore[dict-item]
    assert scenario(**{**SPLIT, "actor_infer": infer, "simulation": simulation}).engines == engines


def test_a_reference_with_devices_of_its_own_does_not_wait_for_the_trainer() -> None:
    costs = {"ref_logp": {"gpu_s_per_token": 0.1}}
    shared = scenario(**SPLIT, simulation=costs).simulation.ref_logp
    apart = scenario(**SPLIT, reference={"device_mapping": [6]}, simulation=costs).simulation.ref_logp
    assert (shared.with_trainer, shared.gpu_s_per_token) == (True, 0.1)
    assert (apart.with_trainer, apart.gpu_s_per_token) == (False, 0.2)  # one device instead of two
