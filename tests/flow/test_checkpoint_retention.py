"""Old checkpoints go, and never one that somebody needs: not the newest, not what it falls back to, not a user's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headway.errors import LedgerError
from headway.flow.checkpointing import remove_old_checkpoints, write_listing
from headway.ledger import Ledger
from headway.ledger.checkpoint_hold import hold_checkpoint, release_checkpoint
from headway.monitor.event_log import EventLog, LoggedEvent
from tests.flow.factory import audit, make_scenario, play_through
from tests.flow.test_checkpoint import checkpoints, spoil


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


def recorded(run_dir: Path) -> list[int]:
    ledger = Ledger(run_dir / "ledger.sqlite")
    try:
        return [version for version, _ in ledger.checkpoints()]
    finally:
        ledger.close()


@pytest.mark.parametrize(("limit", "left"), [(0, (1, 2, 3, 4, 5)), (1, (5,)), (2, (4, 5)), (9, (1, 2, 3, 4, 5))])
def test_the_newest_are_kept_and_the_ledger_names_no_others(limit: int, left: tuple[int, ...], tmp_path: Path) -> None:
    played = play_through(make_scenario(max_steps=5, save_steps=1, save_total_limit=limit), tmp_path)
    assert checkpoints(tmp_path) == steps(*left)
    assert sorted(recorded(tmp_path)) == list(left)
    assert len(played.of("checkpoint.remove")) == 5 - len(left)
    assert audit(tmp_path)["trained"] == 10


def test_one_goes_only_when_the_next_is_recorded(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def look(event: LoggedEvent) -> None:
        if event.kind.startswith("checkpoint"):
            seen.append((event.kind, event.data["trained"]))

    play_through(make_scenario(max_steps=4, save_steps=1, save_total_limit=2), tmp_path, on_event=look)
    kept, removed = "checkpoint", "checkpoint.remove"
    assert seen == [(kept, 1), (kept, 2), (kept, 3), (removed, 1), (kept, 4), (removed, 2)]


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_damaged_one_is_not_counted_so_that_there_is_one_to_fall_back_to(damage: str, tmp_path: Path) -> None:
    def harm(event: LoggedEvent) -> None:
        if event.kind == "step.end" and event.data["trained"] == 4:
            spoil(tmp_path, 3, damage)

    scenario = make_scenario(max_steps=4, save_steps=1, save_total_limit=2)
    play_through(scenario, tmp_path, on_event=harm)
    assert checkpoints(tmp_path) == steps(2, 3, 4)
    play_through(make_scenario(max_steps=5, save_steps=1, save_total_limit=2), tmp_path)
    assert checkpoints(tmp_path) == steps(4, 5), "with two whole ones it goes as well"


def test_a_damaged_newest_falls_back_to_the_one_before_it(tmp_path: Path) -> None:
    play_through(make_scenario(max_steps=4, save_steps=1, save_total_limit=2), tmp_path)
    spoil(tmp_path, 4, "torn")
    played = play_through(make_scenario(max_steps=6, save_steps=1, save_total_limit=2), tmp_path)
    assert [event.data["trained"] for event in played.of("step.end")] == [4, 5, 6]
    assert checkpoints(tmp_path) == steps(5, 6)
    assert audit(tmp_path)["trained"] == 12


def test_what_a_user_put_there_stays_and_so_does_a_checkpoint_with_a_file_of_theirs(tmp_path: Path) -> None:
    play_through(make_scenario(max_steps=2, save_steps=1), tmp_path)
    root = tmp_path / "checkpoints"
    (root / "step-00000001" / "notes.txt").write_text("the best so far")
    shutil.copytree(root / "step-00000002", root / "best")
    (root / "step-00000000").mkdir()
    play_through(make_scenario(max_steps=6, save_steps=1, save_total_limit=2), tmp_path)
    assert checkpoints(tmp_path) == ["best", *steps(0, 1, 5, 6)]
    assert (root / "step-00000001" / "notes.txt").read_text() == "the best so far"
    assert recorded(tmp_path) == [6, 5, 1], "it can still be gone back to"


def test_a_checkpoint_of_another_run_is_not_ours_to_remove(tmp_path: Path) -> None:
    theirs, other = tmp_path / "theirs" / "step-00000001", tmp_path / "linked"
    for directory in (theirs, other):
        directory.mkdir(parents=True)
        (directory / "trainer.json").write_text("{}")
    write_listing(theirs, "another run")
    ledger = Ledger(tmp_path / "ledger.sqlite")
    write_listing(other, ledger.run)
    (tmp_path / "step-00000002").symlink_to(other)
    ledger.checkpoint(1, str(theirs))
    ledger.checkpoint(2, "step-00000002")
    ledger.checkpoint(3, make(tmp_path, ledger, 3))
    assert remove(ledger, tmp_path) == [] and theirs.exists() and other.exists()
    ledger.close()


def make(run_dir: Path, ledger: Ledger, step: int) -> str:
    """A checkpoint with a directory inside it."""
    directory = run_dir / "checkpoints" / f"step-{step:08d}"
    (directory / "vae").mkdir(parents=True)
    for name in ("model.safetensors", "trainer.json", "vae/config.json"):
        (directory / name).write_text(name)
    write_listing(directory, ledger.run)
    return str(directory.relative_to(run_dir))


def remove(ledger: Ledger, run_dir: Path, *, changes: int = 1000) -> list[LoggedEvent]:
    """Keep one, and be killed after so many changes of the disk."""
    events: list[LoggedEvent] = []
    log = EventLog(lambda: 0.0, events.append)
    at_work = remove_old_checkpoints(ledger, 1, root=run_dir / "checkpoints", run_dir=run_dir, events=log)
    for _, _ in zip(range(changes), at_work, strict=False):
        pass
    return events


def test_a_checkpoint_that_somebody_reads_stays_until_a_later_removal(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in (1, 2):
        ledger.checkpoint(step, make(tmp_path, ledger, step))
    read = tmp_path / "checkpoints" / "step-00000001"
    assert hold_checkpoint(read)
    assert remove(ledger, tmp_path) == [] and (read / "model.safetensors").exists()
    ledger.checkpoint(3, make(tmp_path, ledger, 3))
    assert [event.data["trained"] for event in remove(ledger, tmp_path)] == [2]
    release_checkpoint(read)
    assert [event.data["trained"] for event in remove(ledger, tmp_path)] == [1] and not read.exists()
    assert not hold_checkpoint(read), "what is gone cannot be held"
    ledger.close()


def test_a_kill_at_any_point_of_a_removal_leaves_whole_checkpoints_and_what_the_next_one_sweeps(tmp_path: Path) -> None:
    most = 0
    for changes in range(30):
        run_dir = tmp_path / str(changes)
        ledger = Ledger(run_dir / "ledger.sqlite")
        for step in (1, 2, 3):
            ledger.checkpoint(step, make(run_dir, ledger, step))
        remove(ledger, run_dir, changes=changes)
        ledger.close()

        ledger = Ledger(run_dir / "ledger.sqlite")
        assert ledger.last_checkpoint() == (3, "checkpoints/step-00000003")
        named = [path for path in (run_dir / "checkpoints").iterdir() if ".removed-" not in path.name]
        assert run_dir / "checkpoints" / "step-00000003" in named
        for directory in named:
            listing = json.loads((directory / "files.json").read_text())
            assert all((directory / name).stat().st_size == size for name, size in listing["files"].items())
        most = max(most, len(list((run_dir / "checkpoints").iterdir())) * (len(named) < 3))
        remove(ledger, run_dir)
        assert checkpoints(run_dir) == steps(3) and [version for version, _ in ledger.checkpoints()] == [3]
        ledger.close()
    assert most == 3, "some were killed between the first change and the last"


def test_what_cannot_be_removed_is_said_and_the_others_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in (1, 2, 3):
        ledger.checkpoint(step, make(tmp_path, ledger, step))
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith("2"):
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    events = remove(ledger, tmp_path)
    assert [event.data["message"] for event in events if event.kind == "error"] == [
        f"{tmp_path}/checkpoints/step-00000002 cannot be removed: Permission denied"
    ]
    assert checkpoints(tmp_path) == steps(2, 3) and [version for version, _ in ledger.checkpoints()] == [3, 2]
    ledger.close()


def test_the_ledger_does_not_forget_the_newest(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for version in (1, 2):
        ledger.checkpoint(version, "somewhere")
    ledger.forget_checkpoint(1)
    with pytest.raises(LedgerError, match="checkpoint 2 cannot be forgotten: no newer one is on disk"):
        ledger.forget_checkpoint(2)
    name = ledger.run
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.run == name and again.checkpoints() == [(2, "somewhere")]
    again.close()
