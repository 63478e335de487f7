"""A whole run whose trainer and engine are processes on one GPU: `pytest -m gpu tests/weights/test_ipc_cuda_run.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs.factory import SMALL, events, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
OPTIONS = {
    **SMALL,
    "device": "cuda",
    "processes": True,
    "async_generation_ratio": 0,
    "max_steps": 4,
    "weight_transfer.transport": "cuda_ipc",
    "weight_transfer.bucket_mb": 0.05,
}


def test_every_version_is_served_and_nothing_has_to_be_sent_again(tmp_path: Path) -> None:
    make_model(str(tmp_path / "model"))
    given = {**OPTIONS, "pretrain": tmp_path / "model", "output_dir": tmp_path / "run"}
    words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]
    command = [sys.executable, "-m", "headway", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event.data["trained"] for event in events(tmp_path / "run", "step.end")] == [1, 2, 3, 4]
    assert events(tmp_path / "run", "error", "retry", "down", "restart") == []
    oldest = [event.data["oldest"] for event in events(tmp_path / "run", "group.train")]
    assert sorted(set(oldest)) == [0, 1, 2, 3], "each step was made of answers of the version before it"
