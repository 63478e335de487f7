"""`headway train` with vLLM in the engine's own process: it learns on it, and outlives its death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.runs.factory import Run, Runs, audit, count, events
from tests.vllm import test_whole_run as over_http
from tests.vllm.in_process import shared_by
from tests.vllm.server_pool import BASE, PYTHON, family, gone


def engine_of(run: Run) -> list[int]:
    """The processes of the run's engine: our child, and vLLM's of its process group."""
    log = str(run.directory / "logs" / "engine-0.log")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                str((entry / "fd" / "1").readlink()) == log
                and b"headway.processes.child_main" in (entry / "cmdline").read_bytes()
            ):
                return family(int(entry.name))
        except OSError:
            continue
    return []


def test_a_run_trains_on_a_vllm_of_its_engine_and_outlives_its_death(runs: Runs, tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "run"
    assert runs.template.call(f"{over_http.__name__}:save_model", str(model)) == 0
    run = Runs(runs.template, model).train(
        directory,
        f"{BASE}.strategy_name=vllm",
        f"{BASE}.strategy_config.in_process=true",
        f"{BASE}.strategy_config.server_python={PYTHON}",
        f"{BASE}.strategy_config.server_args={{enforce-eager: true}}",
        "actor_infer.generating_args.temperature=0.7",
        f"rewards.arithmetic.reward_fn={over_http.__file__}:lottery",
        "async_generation_ratio=0",
        "max_steps=16",
        "processes=true",
    )
    assert run.until(lambda: count(directory, "step.end") >= 2, 400.0), run.text
    first = engine_of(run)
    assert len(first) >= 5, "ours, vLLM's core and worker, a watchdog and a tracker"
    left = shared_by(first)
    os.kill(first[0], signal.SIGKILL)
    assert run.until(lambda: gone(first, 0.0), 60.0), run.text
    assert run.until(lambda: len(engine_of(run)) >= 5, 200.0), run.text
    second = engine_of(run)
    assert run.end() == 0, run.text
    assert gone(second)
    audit(directory)
    steps = [event.data for event in events(directory, "step.end")]
    assert len(steps) == 16 and all(step["train/grad_norm"] > 0 for step in steps)
    assert any("killed by SIGKILL" in str(event.data) for event in events(directory, "error"))
    assert all(step["train/lag_max"] == 0 for step in steps)
    for step in steps:  # vLLM's log-probabilities are the trainer's own; embedding and output layer are tied
        assert step["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert step["train/ratio_max"] == pytest.approx(1.0, abs=2e-3)
    assert left and not any(path.exists() for path in left)
