"""The benchmark of pictures: its table is what the simulator and the events say."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from benchmarks.pictures.comparison_grid import make_comparison_grid
from benchmarks.pictures.prediction import predict_row
from benchmarks.pictures.prefixes import measure_prefix_sharing
from benchmarks.pictures.rows import ROWS, measure_cover

from headway.config import load_config
from headway.rewards.images.image_reward import array_to_image, image_to_array

ARGS = argparse.Namespace(
    prompts=4,
    group=4,
    slots=4,
    denoising_steps=5,
    warmup=2,
    steps=4,
    score_ms=100.0,
    workers=1,
    latency_s=1.0,
    connections=4,
    device="cpu",
    threads=1,
)
KNOWN = {"denoise_s": 4.0, "train_s": 2.0, "update_s": 0.0}


def test_the_simulator_says_what_can_be_said_with_pencil_and_paper() -> None:
    found = {}
    for row in ROWS:
        strategy = {} if row.hybrid else {"hybrid_engine": False, "num_gpus_per_node": 2}
        resolved = load_config(
            {
                "denoising": {},
                "rollout_batch_size": 4,
                "num_return_sequences_in_group": 4,
                "filter_zero_variance": False,
                "async_generation_ratio": row.alpha,
                "with_reward": not row.serial,
                **strategy,
            }
        )
        found[row.scorer, row.serial, row.alpha] = predict_row(ARGS, row, resolved, KNOWN)["step_s"]
    assert found["none", False, 0] == pytest.approx(4.0 + 2.0)
    assert found["cpu", True, 0] == pytest.approx(4.0 + 1.6 + 2.0), "16 verdicts of 0.1 s, one after the other"
    assert found["cpu", False, 0] == pytest.approx(4.0 + 0.4 + 2.0), "those of the last four pictures are left over"
    assert found["http", True, 0] == pytest.approx(4.0 + 4.0 + 2.0), "16 verdicts of 1 s, four at a time"
    assert found["http", False, 0] == pytest.approx(4.0 + 1.0 + 2.0)
    assert found["http", False, 1] == found["http", False, 2] == pytest.approx(4.0), "all behind denoising"


def test_seconds_are_counted_once_however_many_spans_they_lie_in() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (5.0, 9.0)]
    assert measure_cover(spans, 0.5, 6.0) == pytest.approx(2.5 + 1.0)


def test_a_shared_prefix_saves_the_rows_before_the_window(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from headway.denoising.models.denoiser_storage import save_small_mmdit
    from headway.denoising.models.mmdit import MmditConfig, SmallMmdit

    save_small_mmdit(SmallMmdit(MmditConfig(height=8, width=8, dim=16, heads=2, depth=1)), tmp_path)
    alone, shared = measure_prefix_sharing(ARGS, tmp_path)
    assert alone["calls"] == 4 * 5 and shared["calls"] <= alone["calls"]


def test_a_grid_holds_each_picture_before_and_after() -> None:
    shades = [array_to_image(np.full((4, 6), value, np.uint8)) for value in (10, 20, 30)]
    later = [array_to_image(np.full((4, 6), value, np.uint8)) for value in (110, 120, 130)]
    grid = image_to_array(make_comparison_grid(shades, later, columns=2, scale=1))[:, :, 0]
    inside = [value for row in grid for value in dict.fromkeys(row.tolist()) if value in (10, 20, 30, 110, 120, 130)]
    assert list(dict.fromkeys(inside)) == [10, 110, 20, 120, 30, 130]
