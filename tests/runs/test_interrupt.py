"""Ctrl-C, SIGTERM, and the death of single processes of a run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.ledger.ledger_records import decode_episode, decode_generation
from headway.runs.run_condition import find_status
from headway.types import Generation
from tests.runs.factory import Run, Runs, audit, count, events, gone, parts, rows

LONG: dict[str, Any] = {"max_steps": 300, "response_length": 60, "processes": True}
"""Far from its end whenever it is interrupted; who goes on with it asks for less."""


def stop(run: Run, number: int, after: Callable[[], Any]) -> list[int]:
    """Signal it after something has happened; the processes that it had."""
    assert run.until(after), run.text
    children = list(parts(run).values())
    run.kill(number)
    return children


def finished(run: Run) -> list[tuple[str]]:
    """Samples that the ledger holds whole."""
    return rows(run.directory, "SELECT sample_id FROM payloads JOIN samples USING (row)")


def hold_in_mid_answer(run: Run, engine: int) -> None:
    """Stop the process of the engine at a moment when the run has a part of an answer and waits for the rest."""

    def is_held() -> bool:
        os.kill(engine, signal.SIGSTOP)
        for _ in range(2):  # the first answer leaves the run time to read what the engine has sent already
            stages = find_status(run.directory, timeout_s=60.0)[0].stages
        asked = [wait.what for stage in stages for wait in stage.waits if wait.on == "engine/0"]
        if any(re.search(r", [1-9]\d* tokens so far", what) for what in asked):
            return True
        os.kill(engine, signal.SIGCONT)  # all its answers were whole: others will begin
        return False

    assert run.until(is_held), run.text


def interrupt(run: Run, number: signal.Signals) -> dict[str, bytes]:
    """Stop a run in the middle of an answer, look at what it says and keeps, and return the answers cut off."""
    assert run.until(lambda: count(run.directory, "group.start")), run.text
    processes = parts(run)
    engine, children = processes["engine-0"], list(processes.values())
    assert run.until(lambda: finished(run)), run.text
    hold_in_mid_answer(run, engine)
    try:
        if number == signal.SIGTERM:  # as a batch system does it: every process of the job gets it
            for child in children:
                os.kill(child, number)
        run.kill(number)
        assert run.until(lambda: rows(run.directory, "SELECT row FROM samples WHERE end = 'saved'")), run.text
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)  # the run has let go of all requests: it takes nothing more of them
    assert run.end() == (75 if number == signal.SIGTERM else 1), run.text
    assert gone(children) and len(children) == 2
    assert f"stopped by {number.name}" in run.text and "stops after this step" in run.text
    assert run.text.rstrip().endswith(f"go on with: headway train {run.directory} --resume")
    assert "Traceback" not in run.text
    reached = count(run.directory, "step.end")
    assert rows(run.directory, "SELECT max(version) FROM checkpoints") == [(reached,)]
    assert rows(run.directory, "SELECT count(*) FROM samples WHERE end IS NULL") == [(0,)], "all are saved or trained"
    return dict(rows(run.directory, "SELECT sample_id, body FROM partials JOIN samples USING (row)"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_with_a_checkpoint_and_says_how_to_go_on(
    runs: Runs, tmp_path: Path, number: signal.Signals
) -> None:
    run = runs.train(tmp_path / "run", **LONG)
    begun = interrupt(run, number)
    assert begun, "no answer was cut off: nothing to go on with"
    reached = count(run.directory, "step.end")
    enough = f"max_steps={reached + 5}"
    resumed = runs.start(run.directory, "train", str(run.directory), enough, "save_steps=0", "--resume")
    continued: dict[str, Generation] = {}

    def went_on() -> bool:
        made = dict(rows(run.directory, "SELECT sample_id, body FROM payloads JOIN samples USING (row)"))
        continued.update(
            {sample: decode_episode(made[sample]).turns[0].generation for sample in begun.keys() & made.keys()}
        )
        return bool(continued)

    assert resumed.until(went_on), resumed.text
    for sample, generation in continued.items():
        start = decode_generation(begun[sample])
        assert list(generation.actions[: len(start.actions)]) == list(start.actions)
    assert resumed.end() == 0, resumed.text
    audit(run.directory)


@pytest.mark.parametrize("processes", [True, False])
def test_two_interrupts_end_it_at_once_and_lose_nothing(runs: Runs, tmp_path: Path, processes: bool) -> None:
    run = runs.train(tmp_path / "run", **{**LONG, "processes": processes, "save_steps": 0})
    children = stop(run, signal.SIGINT, lambda: len(finished(run)) > 1)
    assert run.until(lambda: "SIGINT: the run stops" in run.text)
    run.kill(signal.SIGINT)
    assert run.end() in (130, 1), run.text  # 1 where the checkpoint was faster
    assert gone(children)
    assert "Traceback" not in run.text and "go on with: headway train" in run.text
    audit(run.directory)
    made = {event.data["sample"] for event in events(run.directory, "sample.finish")}
    kept = {sample for (sample,) in finished(run)}
    ended = {sample for (sample,) in rows(run.directory, "SELECT sample_id FROM samples WHERE end != 'saved'")}
    assert made and made <= kept | ended
    enough = f"max_steps={count(run.directory, 'step.end') + 1}"
    resumed = runs.start(run.directory, "train", str(run.directory), enough, "--resume")
    assert resumed.end() == 0, resumed.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_the_parts_are_up_leaves_no_process(
    runs: Runs, tmp_path: Path, number: signal.Signals
) -> None:
    run = runs.train(tmp_path / "run", **LONG)
    children = stop(run, number, lambda: count(run.directory, "run.begin"))
    assert run.end() in ((75,) if number == signal.SIGTERM else (130, 1)), run.text  # 1 where the parts were faster
    assert gone([*children, *parts(run).values()])
    assert "Traceback" not in run.text


@pytest.mark.parametrize("who", ["trainer", "engine-0"])
def test_a_run_goes_on_by_itself_when_one_of_its_processes_is_killed(runs: Runs, tmp_path: Path, who: str) -> None:
    steps = 12  # far more than are made until it is killed
    run = runs.train(tmp_path / "run", max_steps=steps, response_length=24, processes=True)
    assert run.until(lambda: count(run.directory, "group.start")), run.text
    victim = parts(run)[who]
    assert run.until(lambda: count(run.directory, "checkpoint")), run.text
    os.kill(victim, signal.SIGKILL)
    assert run.end() == 0, run.text
    assert gone([victim])
    assert "was killed by SIGKILL" in run.text
    assert [event.who for event in events(run.directory, "restart")] == ["trainer" if who == "trainer" else "engine/0"]
    assert all(event.data["trained"] - event.data["oldest"] <= 1 for event in events(run.directory, "group.train"))
    trained = rows(run.directory, "SELECT trained_at, count(*) FROM samples WHERE end = 'trained' GROUP BY 1")
    assert trained == [(step, 4) for step in range(1, steps + 1)]
    audit(run.directory)
