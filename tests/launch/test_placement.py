"""Who gets which cores."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import load_config
from headway.errors import ConfigError
from headway.launch.placement import Machine, Placement, make_visible_devices_env, plan_placement

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
    assert make_visible_devices_env(made, "engine/1") == {"CUDA_VISIBLE_DEVICES": "2"} and "engine/1 2" in made.summary
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert make_visible_devices_env(made, "trainer") == {"CUDA_VISIBLE_DEVICES": "4"}
    assert make_visible_devices_env(made, "engine/1") == {"CUDA_VISIBLE_DEVICES": "6"}


def test_one_gpu_is_shared_by_threads() -> None:
    made = on_gpus(1)
    assert not made.processes and not made.gpus and make_visible_devices_env(made, "trainer") == {}
    assert not on_gpus(4, processes=False).gpus


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (2, {}, "this machine has 2 GPUs"),
        (
            4,
            {"actor_infer.strategy_args.strategy_config.tensor_parallel_size": 2},
            "an engine of this build is on one GPU",
        ),
    ],
)
def test_gpus_that_cannot_be_used_are_refused(gpus: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_gpus(gpus, **options)
