"""Who gets which cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.config import load_config
from headway.errors import ConfigError
from headway.launch import placement
from headway.launch.placement import make_visible_devices_env, plan_placement

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
def test_cores_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, cores: int, options: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(placement, "usable_cores", lambda: cores)
    made = plan_placement(load_config({"device": "cpu", "allow_uncorrected_async": True, **options}))
    assert (made.train_threads, made.infer_threads, made.replicas) == expected
    assert made.processes


def test_processes_can_be_refused_and_a_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not plan_placement(load_config({"processes": False, "device": "cpu"})).processes
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        plan_placement(load_config({"device": "cuda"}))


APART = {"actor_train.device_mapping": [0], "actor_infer.device_mapping": [1, 2], "async_generation_ratio": 1}


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int, **options: Any) -> placement.Placement:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return plan_placement(load_config({"allow_uncorrected_async": True, **APART, **options}))


def test_parts_that_are_mapped_apart_are_processes_with_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = on_gpus(monkeypatch, 4)
    assert (
        made.processes
        and made.replicas == 2
        and {"trainer": 0, "engine/0": 1, "engine/1": 2}.items() <= (made.cards.items())
    )
    assert make_visible_devices_env(made, "engine/1") == {"CUDA_VISIBLE_DEVICES": "2"} and "engine/1 2" in made.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert make_visible_devices_env(made, "trainer") == {"CUDA_VISIBLE_DEVICES": "4"}
    assert make_visible_devices_env(made, "engine/1") == {"CUDA_VISIBLE_DEVICES": "6"}


def test_one_gpu_is_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_gpus(monkeypatch, 1)
    assert not made.processes and not made.cards and make_visible_devices_env(made, "trainer") == {}
    assert not on_gpus(monkeypatch, 4, processes=False).cards


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
def test_gpus_that_cannot_be_used_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_gpus(monkeypatch, gpus, **options)
