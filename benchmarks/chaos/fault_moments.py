"""Moments at which a process is killed. Each function waits for its moment; it returns the problem if it never came."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from benchmarks.chaos.fault_runs import STEPS, ChaosRun

RUN_TIMEOUT_S = 600.0
"""A run that takes longer is considered to hang."""
MAX_DELAY_S = 0.6
"""Longest time between the chosen step and the kill."""
_MAX_CHECKPOINT_DELAY_S = 0.08
_MAX_START_DELAY_S = 1.0

AwaitMoment = Callable[[ChaosRun, Random], str]


def await_random_step(run: ChaosRun, dice: Random) -> str:
    """Wait until shortly after a random one of the steps that are left, or while the run starts."""
    done = run.count_steps()
    wanted = dice.randrange(done, STEPS - 2) if done < STEPS - 2 else done
    if not run.wait_until(lambda: run.is_started() and run.count_steps() >= wanted, RUN_TIMEOUT_S):
        return f"step {wanted} never came"
    time.sleep(dice.random() * MAX_DELAY_S)
    return ""


def await_checkpoint(run: ChaosRun, dice: Random) -> str:
    """Wait until a checkpoint is being written, at the next one or the one after it."""
    for _ in range(dice.randrange(1, 3)):
        before = run.list_checkpoints()
        if not run.wait_until(lambda before=before: run.list_checkpoints() - before, RUN_TIMEOUT_S):  # type: ignore[misc]
            return "no checkpoint was written"
    time.sleep(dice.random() * _MAX_CHECKPOINT_DELAY_S)
    return ""


def await_resumption(run: ChaosRun, dice: Random) -> str:
    """Wait until some moment of the start, or shortly after it."""
    if dice.random() < 0.6:  # past the imports, where the ledger and the checkpoint are read
        run.wait_until(run.is_started, RUN_TIMEOUT_S)
    time.sleep(dice.random() * _MAX_START_DELAY_S)
    return ""
