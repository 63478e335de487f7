"""Who gets which cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.build import placement
from headway.build.placement import place
from headway.config import load
from headway.errors import ConfigError

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
    made = place(load({"device": "cpu", "allow_uncorrected_async": True, **options}))
    assert (made.train_threads, made.infer_threads, made.replicas) == expected
    assert made.processes


def test_processes_can_be_refused_and_a_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not place(load({"processes": False, "device": "cpu"})).processes
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        place(load({"device": "cuda"}))
