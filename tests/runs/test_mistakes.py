"""What people get wrong: a message that says what and where, an exit code, no traceback, and nothing left running."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs.factory import Run, Runs, audit, count, rows

REWARDS = """
import math
import zlib

def always(text, data):
    raise ValueError("I am always wrong")

def sometimes(text, data):
    if zlib.crc32(text.encode()) % 3 == 0:
        raise KeyError("solution")
    return float(len(text) % 2)

def words(text, data):
    return "good"

def nothing(text, data):
    return math.nan
"""


def write(path: Path, *rows: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data(path: Path) -> dict[str, Any]:
    return {"actor_train.data_args.file_name": path, "rewards.arithmetic.tag_included": None}


def refused(run: Run, *words: str) -> None:
    """Before anything started."""
    assert run.end() == 2, run.text
    for word in words:
        assert word in run.text
    assert "Traceback" not in run.text
    assert not (run.directory / "ledger.sqlite").exists()


def test_what_cannot_be_trained_is_refused_with_the_key_and_the_reason(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    shutil.copytree(runs.model, tmp_path / "small")
    described = (runs.model / "config.json").read_text(encoding="utf-8")
    (tmp_path / "small" / "config.json").write_text(re.sub(r'("vocab_size": )\d+', r"\g<1>44", described))
    long = "1+" * 40
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"pretrain": "/nowhere/model"}, ("pretrain = '/nowhere/model'", "no such directory")),
        ({"pretrain": "no-such-model"}, ("pretrain", "tiny-sums")),
        ({"pretrain": tmp_path / "plain"}, ("config.json", "not a model")),
        ({"pretrain": tmp_path / "small"}, ("pretrain", "the model knows 44: do they belong together?")),
        (data(write(tmp_path / "empty.jsonl")), ("empty.jsonl", "has no rows")),
        (data(tmp_path / "missing.jsonl"), ("missing.jsonl", "no such file")),
        (data(write(tmp_path / "column.jsonl", {"question": "1+1="})), ("no column 'prompt'", "here are question")),
        (data(write(tmp_path / "long.jsonl", {"prompt": long, "answer": "2"})), ("1 of 1 prompts are longer",)),
        ({"rewards.arithmetic.reward_fn": "broken:f"}, ("rewards.arithmetic", "nothing_like_this")),
        ({"response_length": 600}, ("sequence_length = 648", "knows 512 positions")),
        ({"output_dir": tmp_path / "file"}, ("output_dir", "cannot be written")),
        ({"output_dir": "/proc/nothing"}, ("output_dir", "cannot be written")),
        ({"checkpoint_dir": tmp_path / "file"}, ("checkpoint_dir", "cannot be written")),
        ({"resume": tmp_path / "plain"}, ("resume", "no checkpoint of a run")),
    ]
    for number, (options, words) in enumerate(cases):
        refused(runs.train(tmp_path / f"run{number}", **options), *words)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("always", ("raised ValueError: I am always wrong", "mine.py:6")),
        ("words", ("returned 'good' (str), not a number",)),
        ("nothing", ("returned nan",)),
    ],
)
def test_a_reward_that_always_fails_stops_the_run_and_is_quoted(
    runs: Runs, tmp_path: Path, function: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    fn = f"{tmp_path / 'mine.py'}:{function}"
    run = runs.train(tmp_path / "run", reliability__sample_retries=0, **{"rewards.arithmetic.reward_fn": fn})
    assert run.end() == 1, run.text
    (ending,) = [line for line in run.text.splitlines() if line.startswith("ended early after step 0")]
    for word in words:
        assert word in ending
    assert "Traceback" not in run.text
    assert len(run.text.splitlines()) < 40, "the same complaint is not printed for every sample"
    reasons = {reason for (reason,) in rows(run.directory, "SELECT reason FROM samples WHERE end = 'dropped'")}
    assert "reward_failed" in reasons
    audit(run.directory)


def test_a_reward_that_fails_now_and_then_costs_its_samples_and_they_are_counted(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    fn = f"{tmp_path / 'mine.py'}:sometimes"
    run = runs.train(tmp_path / "run", **{"rewards.arithmetic.reward_fn": fn})
    assert run.end() == 0, run.text
    ((dropped,),) = rows(run.directory, "SELECT count(*) FROM samples WHERE reason = 'reward_failed'")
    assert dropped
    (line,) = [line for line in run.text.splitlines() if line.startswith(" dropped samples")]
    assert f"reward_failed {dropped}" in line
    assert "raised KeyError: 'solution'" in run.text


def test_prompts_that_are_too_long_are_left_out_with_a_note(runs: Runs, tmp_path: Path) -> None:
    prompts = write(tmp_path / "some.jsonl", *({"prompt": "1+" * (1 + 39 * (n % 2)), "answer": "2"} for n in range(16)))
    run = runs.train(tmp_path / "run", max_steps=1, **data(prompts))
    assert run.end() == 0, run.text
    assert "note: actor_train.data_args: 8 of 16 prompts are longer than prompt_length = 48" in run.text


@pytest.mark.parametrize("largest_file", [50_000, 300_000])
def test_a_disk_that_is_full_stops_the_run_and_loses_nothing(runs: Runs, tmp_path: Path, largest_file: int) -> None:
    """Of files of 50 kB the ledger fails first, of 300 kB the checkpoints."""
    options = {"max_steps": 4, "reliability.restart_backoff_s": 0, "reliability.step_retries": 0}
    run = runs.train(tmp_path / "run", largest_file=largest_file, **options)
    assert run.end() == 1, run.text
    assert "Traceback" not in run.text
    assert ("ledger.sqlite: disk I/O error" if largest_file < 100_000 else "File too large") in run.text
    assert f"go on with: headway train {run.directory} --resume" in run.text
    finished = set(rows(run.directory, "SELECT sample_id FROM payloads JOIN samples USING (row)"))
    assert finished
    audit(run.directory)
    resumed = runs.train(run.directory, "--resume", **options)
    assert resumed.end() == 0, resumed.text
    ended = set(rows(run.directory, "SELECT sample_id FROM samples WHERE end IS NOT NULL"))
    assert finished <= ended
    audit(run.directory)


def test_an_event_log_that_cannot_be_written_stops_the_run_cleanly(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", max_steps=1)
    assert run.end() == 0, run.text
    log = run.directory / "events.jsonl"
    before = json.dumps([10**7, "note", "run", {"text": "x" * 1000}]) + "\n"
    log.write_text(before)
    shutil.move(run.directory / "events", tmp_path / "events")
    (run.directory / "events").write_text("a file where a directory is needed")
    more = runs.train(run.directory, max_steps=200)
    assert more.end() == 1, more.text
    assert "the event log cannot be written: File exists" in more.text
    assert f"go on with: headway train {run.directory} --resume" in more.text
    assert "Traceback" not in more.text
    assert log.read_text() == before
    audit(run.directory)
    (run.directory / "events").unlink()
    shutil.move(tmp_path / "events", run.directory / "events")
    again = runs.train(run.directory, max_steps=5)
    assert again.end() == 0, again.text


def test_a_second_run_in_one_directory_is_refused_and_the_first_goes_on(runs: Runs, tmp_path: Path) -> None:
    first = runs.train(tmp_path / "run", max_steps=400, processes=True)
    assert first.until(lambda: count(first.directory, "checkpoint"))
    second = runs.start(tmp_path / "second", "train", *runs.words(first.directory, max_steps=400))
    assert second.end() == 2
    assert f"a run is at work here (process {first.pid})" in second.text
    judged = runs.start(tmp_path / "judged", "eval", str(first.directory), "--limit", "2", "processes=false")
    assert judged.end() == 0, judged.text
    assert f"policy {first.directory / 'checkpoints' / 'step-'}" in judged.text
    assert first.alive
    os.kill(first.pid, 9)
    first.end()


def test_a_port_that_is_taken_is_said_to_be(runs: Runs, tmp_path: Path) -> None:
    import socket

    run = runs.train(tmp_path / "run", max_steps=1)
    assert run.end() == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        served = runs.start(tmp_path / "page", "report", str(run.directory), "--serve", str(taken.getsockname()[1]))
        assert served.end() == 2, served.text
    assert "Traceback" not in served.text
