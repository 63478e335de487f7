"""The ledger's rules, one by one: what it takes, what it refuses, and what it keeps."""

from __future__ import annotations

import math
import multiprocessing
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.errors import LedgerError
from headway.ledger import Ledger
from headway.types import DropReason, Score

from .factory import finish_group, killed_copy, make_episode, make_generation, start_group


def test_every_sample_is_counted_by_its_end() -> None:
    ledger = Ledger(":memory:")
    ledger.train_group(0, finish_group(ledger, 0), 1)
    start_group(ledger, 1, 3)
    ledger.drop_sample("1/0", DropReason.SURPLUS_MEMBER)
    assert ledger.drop_group(1, DropReason.GROUP_FAILED) == ["1/1", "1/2"]
    start_group(ledger, 2)
    assert ledger.counts() == {
        "trained": 2,
        "saved": 0,
        "open": 2,
        "dropped:surplus_member": 1,
        "dropped:group_failed": 2,
    }
    assert ledger.save_open({}) == ["2/0", "2/1"]
    assert (ledger.counts()["saved"], ledger.counts()["open"]) == (2, 0)
    assert ledger.audit() == []


REFUSED: dict[str, tuple[Callable[[Ledger], object], str]] = {
    "a second end": (lambda ledger: ledger.drop_sample("1/0", DropReason.FILTERED), "1/0 is not open"),
    "an end without a start": (lambda ledger: ledger.drop_sample("9/0", DropReason.FILTERED), "9/0 is not open"),
    "an unknown finish": (lambda ledger: ledger.finish_sample(make_episode("9/0")), "9/0 is not open"),
    "a finish after the end": (lambda ledger: ledger.finish_sample(make_episode("1/0")), "1/0 is not open"),
    "a second finish": (lambda ledger: ledger.finish_sample(make_episode("1/1")), "1/1 is finished already"),
    "a second training": (lambda ledger: ledger.train_group(0, ["0/0", "0/1"], 2), "group 0 is not open"),
    "a dropped member trained": (lambda ledger: ledger.train_group(1, ["1/0", "1/1", "1/2"], 2), "whole or not"),
    "a part trained": (lambda ledger: ledger.train_group(1, ["1/1"], 2), "whole or not at all"),
    "one member twice": (lambda ledger: ledger.train_group(1, ["1/1", "1/1"], 2), "whole or not at all"),
    "an unfinished member trained": (lambda ledger: ledger.train_group(1, ["1/1", "1/2"], 2), "1/2 cannot be trained"),
    "nothing trained": (lambda ledger: ledger.train_group(2, [], 2), "whole or not at all"),
    "a position that is being worked on": (lambda ledger: ledger.start_group(3, 1), "position 1 cannot start"),
    "a position that was trained": (lambda ledger: ledger.start_group(3, 0), "position 0 cannot start"),
    "a group started twice": (lambda ledger: ledger.start_group(1, 5), "ids up to 2 have been used"),
    "an open sample started twice": (lambda ledger: ledger.start_sample("1/1", 1), "1/1 of group 1 was started before"),
    "a dropped sample started again": (lambda ledger: ledger.start_sample("1/0", 1), "1/0 of group 1 was started"),
    "a member of a group that ended": (lambda ledger: ledger.start_sample("0/2", 0), "group 0 is not open"),
    "a group that ended dropped": (lambda ledger: ledger.drop_group(0, DropReason.FILTERED), "group 0 is not open"),
    "an unfinished grade": (lambda ledger: ledger.grade_group(1, [("1/2", Score(value=1.0), 0.5)]), "1/2 is no"),
    "a partial of a finished one": (lambda ledger: ledger.store_partials({"1/1": make_generation(0)}), "finished"),
    "a stop with a foreign partial": (lambda ledger: ledger.save_open({"9/0": make_generation(0)}), "9/0 is not open"),
}


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "buffered"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_rule_raises_at_once_and_changes_nothing(name: str, deferred: bool) -> None:
    ledger = Ledger(":memory:", defer=(lambda flush: None) if deferred else None)
    ledger.train_group(0, finish_group(ledger, 0), 1)
    start_group(ledger, 1, 3)
    ledger.drop_sample("1/0", DropReason.ENGINE_FAILED)
    ledger.finish_sample(make_episode("1/1"))
    ledger.start_group(2, 2)
    before = ledger.counts()
    break_rule, said = REFUSED[name]
    with pytest.raises(LedgerError, match=said):
        break_rule(ledger)
    assert ledger.counts() == before
    assert ledger.audit() == []
    ledger.finish_sample(make_episode("1/2"))
    ledger.train_group(1, ["1/2", "1/1"], 2)
    assert ledger.audit() == []


def test_a_step_that_a_checkpoint_has_passed_cannot_train_any_more() -> None:
    ledger = Ledger(":memory:")
    ids = finish_group(ledger, 0)
    ledger.checkpoint(3, "c3")
    with pytest.raises(LedgerError, match="checkpoint 3 is on disk"):
        ledger.train_group(0, ids, 3)
    ledger.train_group(0, ids, 4)


def test_writes_wait_for_the_deferred_flush_and_are_one_transaction(tmp_path: Path) -> None:
    waiting: list[Callable[[], None]] = []
    ledger = Ledger(tmp_path / "ledger.db", defer=waiting.append)
    finish_group(ledger, 0)
    assert len(waiting) == 1
    reader = sqlite3.connect(tmp_path / "ledger.db")
    count = "SELECT (SELECT count(*) FROM samples), (SELECT count(*) FROM payloads)"
    assert reader.execute(count).fetchone() == (0, 0)
    waiting.pop()()
    assert reader.execute(count).fetchone() == (2, 2)
    ledger.drop_sample("0/0", DropReason.FILTERED)
    assert len(waiting) == 1
    reader.close()


def test_a_checkpoint_prunes_what_it_was_trained_on_and_nothing_else(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    start_group(ledger, 0)
    for group_id in (1, 2):  # the rows of group 0 lie on both sides of those of group 1
        ids = finish_group(ledger, group_id)
        ledger.grade_group(group_id, [(sample_id, Score(value=1.0), 0.0) for sample_id in ids])
    ledger.start_sample("0/2", 0)
    for member in range(3):
        ledger.finish_sample(make_episode(f"0/{member}"))
    ledger.train_group(0, ["0/0", "0/1", "0/2"], 1)
    ledger.train_group(1, ["1/0", "1/1"], 2)
    assert ledger.last_checkpoint() is None
    ledger.checkpoint(1, "checkpoints/1")
    assert ledger.last_checkpoint() == (1, "checkpoints/1")
    reader = sqlite3.connect(tmp_path / "ledger.db")
    assert reader.execute("SELECT DISTINCT group_id FROM payloads").fetchall() == [(1,), (2,)]
    assert ledger.audit() == []
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.checkpoint(2, "checkpoints/2")
    assert reader.execute("SELECT DISTINCT group_id FROM payloads").fetchall() == [(2,)]
    assert reader.execute("SELECT group_id FROM grades").fetchall() == [(2,)]
    reader.close()


def test_grades_come_back_even_where_they_are_not_numbers() -> None:
    ledger = Ledger(":memory:")
    finish_group(ledger, 0)
    ledger.grade_group(
        0, [("0/0", Score(value=0.1, parts={"format": 1 / 3}), -0.7), ("0/1", Score(value=1.0), math.nan)]
    )
    grades = ledger.restore(0).groups[0].grades
    assert grades["0/0"] == (Score(value=0.1, parts={"format": 1 / 3}), -0.7)
    assert math.isnan(grades["0/1"][1])


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    waiting: list[Callable[[], None]] = []
    ledger = Ledger(path, defer=waiting.append)
    start_group(ledger, 0, 200)
    ledger.flush()
    db = ledger._journal.db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    for member in range(199):
        ledger.finish_sample(make_episode(f"0/{member}", *range(50)))
    waiting.pop()()  # the event loop's turn: nobody to raise to
    with pytest.raises(LedgerError, match=r"ledger\.db: database or disk is full.*nothing is lost"):
        ledger.finish_sample(make_episode("0/199"))
    with pytest.raises(LedgerError, match="full"):
        ledger.close()
    assert db.execute("SELECT count(*) FROM payloads").fetchone() == (0,)
    db.execute("PRAGMA max_page_count = 100000")
    ledger.flush()
    killed = Ledger(killed_copy(path, tmp_path / "copy"))
    assert len(killed.restore(0).groups[0].episodes) == 200
    assert ledger.audit() == killed.audit() == []


def test_a_second_owner_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    with pytest.raises(LedgerError, match=r"ledger\.db: in use by process \d+; wait for that run"):
        Ledger(tmp_path / "ledger.db")
    ledger.close()
    Ledger(tmp_path / "ledger.db").close()


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ledger = Ledger(tmp_path / "ledger.db")
    leave = context.Event()
    worker = context.Process(target=leave.wait)
    worker.start()
    ledger.close()
    Ledger(tmp_path / "ledger.db").close()
    leave.set()
    worker.join()


def test_a_file_that_is_not_a_ledger_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.db"
    text.write_text("not a database, " * 100)
    with pytest.raises(LedgerError, match=r"notes\.db.*not a ledger"):
        Ledger(text)
    assert text.read_text().startswith("not a database")
    other = tmp_path / "other.db"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    with pytest.raises(LedgerError, match=r"other\.db: a database of another program; move it away"):
        Ledger(other)


def test_a_ledger_of_a_newer_headway_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = '99'")
    db.commit()
    db.close()
    with pytest.raises(LedgerError, match=r"schema 99 was written by a newer Headway.*upgrade"):
        Ledger(path)


def test_a_directory_that_cannot_hold_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").mkdir()
    with pytest.raises(LedgerError, match=r"ledger\.db: unable to open"):
        Ledger(tmp_path / "ledger.db")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE samples SET sample_id = '0/0'", "sample 0/0 was started 4 times"),
        ("DELETE FROM groups WHERE group_id = 1", "belongs to group 1, which was never started"),
        (
            "UPDATE samples SET end = NULL, trained_at = NULL WHERE row = 1",
            "group 0 was trained partly: its sample 0/0",
        ),
        ("UPDATE samples SET trained_at = 7 WHERE row = 1", "group 0 was trained partly"),
        (
            "UPDATE samples SET reason = 'filtered' WHERE row = 1",
            "has an end that is not one: trained, reason filtered",
        ),
        ("UPDATE groups SET end = NULL, trained_at = NULL", "0/0 was trained, its group 0 was not"),
        ("UPDATE groups SET end = 'dropped' WHERE group_id = 1", "group 1 was dropped, its sample 1/0 is open"),
        ("UPDATE groups SET position = 0, end = 'trained'", "position 0 has more than one group that counts: 0 and 1"),
        ("DELETE FROM payloads WHERE row = 2", "sample 0/1 was trained for version 1, which is in no checkpoint"),
        ("DELETE FROM samples WHERE row = 1", "row 1 has a payload and no sample"),
        ("INSERT INTO partials VALUES (1, 0, '')", "row 1 has a partial sequence and no unfinished sample"),
        ("UPDATE groups SET position = 4 WHERE group_id = 1", "first unread position 5, waiting [1, 2, 3] in the file"),
        ("DELETE FROM samples WHERE row = 3", "open: 1 samples in the file, 2 in memory"),
    ],
)
def test_the_audit_sees_damage(damage: str, said: str) -> None:
    ledger = Ledger(":memory:")
    ledger.train_group(0, finish_group(ledger, 0), 1)
    start_group(ledger, 1)
    assert ledger.audit() == []
    ledger._journal.db.execute(damage)
    assert any(said in problem for problem in ledger.audit()), ledger.audit()


def test_an_end_that_the_file_has_already_is_not_written_twice() -> None:
    ledger = Ledger(":memory:", defer=lambda flush: None)
    ids = finish_group(ledger, 0)
    ledger.flush()
    ledger._journal.db.execute("UPDATE samples SET end = 'dropped', reason = 'filtered' WHERE row = 1")
    ledger.train_group(0, ids, 1)
    with pytest.raises(LedgerError, match="1 ends written instead of 2"):
        ledger.flush()
