"""A real run that trains three steps between two weight syncs, killed between two of them and taken up again."""

from __future__ import annotations

from pathlib import Path

from tests.runs.factory import Runs, audit, count, events, hold_after

OPTIONS = {"updates_per_sync": 3, "async_generation_ratio": 2, "max_steps": 8, "save_steps": 1, "processes": True}


def test_engines_get_every_third_version_across_a_kill(runs: Runs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    held, opened = hold_after(4, tmp_path)
    run = runs.train(directory, **OPTIONS, **held)
    assert run.until(lambda: count(directory, "checkpoint") >= 4), run.text
    run.kill()
    run.end()
    done = max(event.data["trained"] for event in events(directory, "checkpoint"))
    first = {event.data["version"] for event in events(directory, "served")}
    assert done < 8 and first <= {0, 3, 6}
    opened.touch()
    assert runs.train(directory, **OPTIONS, **held).end() == 0
    served = {event.data["version"] for event in events(directory, "served")}
    assert served - first <= {done, 3, 6, 8}  # the checkpoint it goes on from, every third, and the last
    assert 8 in served
    lags = [event.data["trained"] - event.data["oldest"] for event in events(directory, "group.train")]
    assert min(lags) >= 0 and max(lags) <= 2
    assert max(event.data["trained"] for event in events(directory, "step.end")) == 8
    audit(directory)
