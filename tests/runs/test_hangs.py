"""Runs in which one thing hangs for real: the stalled run prints who it is, on what, and since when."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agents.factory import world
from tests.runs.factory import Run, Runs, audit, count, gone, parts

USER_CODE = """
import asyncio, time

from headway.flow.stage import Stage, register_stage
from headway.types import SampleGroup

def sleepy(text, data):
    time.sleep(3600)
    return 0.0

async def waits_forever(text, data):
    await asyncio.sleep(3600)

def fine(text, data):
    return float(len(text) % 2)

@register_stage("tarpit")
class Tarpit(Stage):
    consumes = produces = SampleGroup

    async def process(self, group):
        if self.pipeline.headway.trained:
            await asyncio.sleep(3600)
        return group

@register_stage("pocket")
class Pocket(Stage):
    consumes = produces = SampleGroup

    async def process(self, group):
        return group if not self.pipeline.headway.trained else None
"""
SOON: dict[str, Any] = {"reliability__stall_timeout_s": 1.0, "max_steps": 500, "save_steps": 0}


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USER_CODE)
    return str(tmp_path / "mine.py")


def find_stall(run: Run, *words: str, blames: Callable[[str], bool] = bool) -> str:
    """What the run said when nothing had moved for a while, once it holds all `words`. The run is killed then.

    On a slow machine a run may stall a little while it starts or between two samples, and blame whoever is at work.
    """

    def blamed() -> list[str]:
        stalls = run.text.split("nothing has moved")[1:]
        return [stall for stall in stalls if all(word in stall for word in words) and blames(stall)]

    assert run.until(blamed), run.text
    said = blamed()[0]
    children = list(parts(run).values())
    run.kill()
    run.end()
    for child in children:
        if Path(f"/proc/{child}").exists():
            os.kill(child, signal.SIGCONT)
    assert gone(children)
    audit(run.directory)
    assert "Traceback" not in run.text
    return said


@pytest.mark.parametrize("function", ["sleepy", "waits_forever"])
def test_a_reward_function_that_sleeps_is_named_with_its_sample(
    runs: Runs, tmp_path: Path, mine: str, function: str
) -> None:
    run = runs.train(tmp_path / "run", rewards__arithmetic__reward_fn=f"{mine}:{function}", **SOON)
    said = find_stall(run, "the oldest of 8 (for ", "  reward waits for scores: 2 scores of group ")
    first = said.splitlines()[0]
    assert f"culprit: scores waits for rewards.arithmetic ({mine}:{function}): reward of sample " in first
    assert "the oldest of 8 (for " in first and " s)" in first
    assert "ring" not in said


def test_a_step_of_an_environment_that_hangs_is_named_with_its_sample_and_turn(runs: Runs, tmp_path: Path) -> None:
    limits = {"custom_envs__lake__workers": 1, "async_generation_ratio": 0, "eval_steps": 0, **SOON}
    run = world(runs, tmp_path / "run", "Stuck", seed=540, **limits)
    said = find_stall(run, "culprit: generate waits for environment lake: step of sample ")
    assert " in turn 1, task " in said.splitlines()[0]


def test_an_engine_that_is_stopped_is_named_with_its_request_or_its_update(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", processes=True, response_length=24, **SOON)
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text
    os.kill(parts(run)["engine-0"], signal.SIGSTOP)
    said = find_stall(run, "waits for engine/0: ")
    culprits = {line.partition("culprit: ")[2] for line in said.splitlines() if "culprit" in line}
    for culprit in culprits:
        request = culprit.startswith("generate waits for engine/0: request ") and " tokens so far" in culprit
        assert request or culprit.startswith("param_update waits for engine/0: "), culprit
    assert culprits


def test_a_trainer_that_is_stopped_is_named_with_its_step(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", processes=True, response_length=24, **SOON)
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text
    os.kill(parts(run)["trainer"], signal.SIGSTOP)

    def blames_trainer(stall: str) -> bool:  # an earlier step may have been slow enough to be blamed as well
        first, step = stall.splitlines()[0], count(run.directory, "step.end") + 1
        return f"culprit: train waits for trainer: step {step}, 4 samples (for " in first or (
            "culprit: param_update waits for trainer: gather of version " in first
        )

    find_stall(run, "waits for trainer: ", blames=blames_trainer)


def test_of_several_ranks_the_one_that_is_stopped_is_named(runs: Runs, tmp_path: Path) -> None:
    devices = {"num_gpus_per_node": 3, "actor_train__device_mapping": "[0,1]", "actor_infer__device_mapping": "[2]"}
    sizes = {"actor_train__training_args__per_device_train_batch_size": 2, "processes": True}
    run = runs.train(tmp_path / "run", **devices, **sizes, **SOON)
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text
    stopped = parts(run)["trainer-1"]
    os.kill(stopped, signal.SIGSTOP)
    first = find_stall(run, "trainer waits for trainer/1").splitlines()[0]
    assert "culprit: trainer waits for trainer/1: " in first and f" in process {stopped}, which is stopped" in first


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("tarpit", "culprit: tarpit waits for tarpit.process: group "),
        ("pocket", "went in and was neither passed on nor dropped (for "),
    ],
)
def test_a_stage_that_never_returns_or_loses_groups_is_named(
    runs: Runs, tmp_path: Path, mine: str, stage: str, words: str
) -> None:
    own = {"plugins": f"[{mine}]", "stages": f"[{{name: {stage}, after: rollout}}]"}
    assert words in find_stall(runs.train(tmp_path / "run", **own, **SOON), words).splitlines()[0]


def test_a_validation_that_hangs_is_named_with_its_sample(runs: Runs, tmp_path: Path, mine: str) -> None:
    keys = {"rewards__arithmetic__reward_fn": f"{mine}:sleepy", "eval_steps": 1, "val_batch_size": 2}
    keys |= {"validation.data_args.file_name": "addition", "eval_at_start": True}
    first = find_stall(runs.train(tmp_path / "run", **keys, **SOON), "culprit: validate").splitlines()[0]
    assert f"culprit: validate waits for rewards.arithmetic ({mine}:sleepy): reward of sample v0.0, task 0" in first
