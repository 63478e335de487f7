"""Going back to a checkpoint: what comes back, under which version, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import LedgerError
from headway.ledger import Ledger, rebase_version
from headway.types import DropReason, Episode, Generation, Score

from .factory import finish_group, killed_copy, make_episode, make_generation, start_group


def versions(record: Generation | Episode) -> list[int]:
    return [run.version for run in record.runs for _ in range(run.count)]


def test_a_new_file_begins_at_the_beginning() -> None:
    restored = Ledger(":memory:").restore(0)
    assert (restored.cursor, restored.pending, restored.groups, restored.next_group_id) == (0, (), (), 0)


def test_training_after_the_checkpoint_is_taken_back_and_before_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    for group_id in range(3):
        ids = finish_group(ledger, group_id)
        ledger.grade_group(group_id, [(sample_id, Score(value=1.0), 0.5) for sample_id in ids])
        ledger.train_group(group_id, ids, group_id + 1)
    ledger.checkpoint(2, "c2")
    ledger = Ledger(killed_copy(path, tmp_path / "killed"))
    restored = ledger.restore(2)
    (group,) = restored.groups
    assert (group.group_id, group.position, group.open, group.members_started) == (2, 2, (), 2)
    assert group.episodes["2/1"] == make_episode("2/1", 0, position=2)
    assert group.grades == {"2/0": (Score(value=1.0), 0.5), "2/1": (Score(value=1.0), 0.5)}
    assert (restored.cursor, restored.next_group_id, restored.lineage) == (3, 3, 1)
    assert ledger.counts() == {"trained": 4, "saved": 0, "open": 2}
    assert (
        ledger._journal.db.execute("SELECT lineage, end, trained_at FROM undone").fetchall() == [(1, "trained", 3)] * 2
    )
    ledger.train_group(2, ["2/0", "2/1"], 3)
    assert ledger.audit() == []


def test_saved_samples_go_on_where_they_stopped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    start_group(ledger, 0, 4)
    ledger.finish_sample(make_episode("0/0", 1))
    ledger.drop_sample("0/1", DropReason.ENGINE_FAILED)
    ledger.store_partials({"0/2": make_generation(0)})
    assert ledger.save_open({"0/2": make_generation(0, 0, 1)}) == ["0/0", "0/2", "0/3"]
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.db")
    assert ledger.counts() == {"trained": 0, "saved": 3, "dropped:engine_failed": 1, "open": 0}
    (group,) = ledger.restore(1).groups
    assert (group.open, group.members_started) == (("0/2", "0/3"), 4)
    assert versions(group.partials["0/2"]) == [0, 0, 1]
    ledger.finish_sample(make_episode("0/2", 0, 0, 1, 1))
    ledger.finish_sample(make_episode("0/3", 1))
    ledger.train_group(0, ["0/0", "0/2", "0/3"], 2)
    assert ledger.audit() == []


def test_positions_are_given_out_again_unless_a_later_group_took_them() -> None:
    ledger = Ledger(":memory:")
    reasons = [DropReason.STALE_IN_QUEUE, DropReason.ZERO_VARIANCE, DropReason.LOST_LINEAGE, DropReason.SURPLUS_GROUP]
    for group_id, reason in enumerate(reasons):
        start_group(ledger, group_id)
        ledger.drop_group(group_id, reason)
    assert ledger.restore(0).pending == (0, 2, 3)
    start_group(ledger, 4, position=2)
    start_group(ledger, 5, position=0)
    ledger.drop_group(5, DropReason.STALE_IN_FLIGHT)
    start_group(ledger, 6, position=3)
    ledger.drop_group(6, DropReason.GROUP_FAILED)
    restored = ledger.restore(0)
    assert (restored.pending, restored.cursor, restored.next_group_id) == ((0,), 4, 7)


def test_positions_that_were_passed_over_are_given_out_again() -> None:
    ledger = Ledger(":memory:")
    start_group(ledger, 0, position=0)
    start_group(ledger, 1, position=3)
    assert (ledger.restore(0).pending, ledger.restore(0).cursor) == ((1, 2), 4)
    start_group(ledger, 2, position=2)
    assert ledger.restore(0).pending == (1,) and ledger.audit() == []


@pytest.mark.parametrize("table", ["payloads", "partials", "grades"])
def test_a_damaged_record_costs_its_group_which_is_generated_again(tmp_path: Path, table: str) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    for group_id in range(2):
        first, second = start_group(ledger, group_id, 2)
        ledger.finish_sample(make_episode(first, 1))
        ledger.grade_group(group_id, [(first, Score(value=1.0), 0.5)])
        ledger.store_partials({second: make_generation(1, 1)})
    key = "group_id" if table == "grades" else "row"
    db = ledger._journal.db
    (body,) = db.execute(f"SELECT body FROM {table} ORDER BY {key} LIMIT 1").fetchone()
    damaged = body.replace("0.5", "9.5") if table == "grades" else body[:20] + b"\x55" + body[21:]
    db.execute(f"UPDATE {table} SET body = ? WHERE {key} = (SELECT min({key}) FROM {table})", (damaged,))
    restored = ledger.restore(1)
    assert restored.damaged == (0,) and restored.pending == (0,)
    assert [group.group_id for group in restored.groups] == [1]
    assert ledger.counts()["dropped:damaged_record"] == 2 and ledger.audit() == []


def test_a_file_in_which_two_groups_have_one_position_is_refused_untouched(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    start_group(ledger, 0)
    start_group(ledger, 1)
    ledger._journal.db.execute("UPDATE groups SET position = 0")
    with pytest.raises(LedgerError, match="position 0 has more than one group that counts: 0 and 1"):
        ledger.restore(0)
    assert ledger._journal.db.execute("SELECT count(*) FROM restores").fetchone() == (0,)


def test_actions_of_lost_weights_are_renumbered_once_and_for_good(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    finish_group(ledger, 0, 1, made_by=(4, 5, 6, 7))
    start_group(ledger, 1, 1)
    ledger.store_partials({"1/0": make_generation(5, 6)})
    for crash in range(3):  # nothing happens in between, so nothing may change
        ledger = Ledger(killed_copy(path, tmp_path / str(crash)))
        path = tmp_path / str(crash) / path.name
        done, begun = ledger.restore(5).groups
        assert versions(done.episodes["0/0"]) == [4, 5, 4, 3]
        assert versions(begun.partials["1/0"]) == [5, 4]
    ledger.finish_sample(make_episode("1/0", 5, 4, 6, 7))  # resumed; 6 and 7 are of the new lineage
    assert versions(ledger.restore(7).groups[1].episodes["1/0"]) == [5, 4, 6, 7]
    assert versions(ledger.restore(6).groups[1].episodes["1/0"]) == [5, 4, 6, 5]


def test_groups_whose_payload_an_unreadable_checkpoint_had_pruned_are_made_again() -> None:
    ledger = Ledger(":memory:")
    for group_id in range(3):
        ledger.train_group(group_id, finish_group(ledger, group_id), group_id + 1)
        ledger.checkpoint(group_id + 1, f"c{group_id + 1}")
    ledger.train_group(3, finish_group(ledger, 3), 4)
    restored = ledger.restore(1)
    assert restored.pending == (1, 2)
    assert [group.group_id for group in restored.groups] == [3]
    assert ledger.last_checkpoint() == (1, "c1")
    assert ledger.counts() == {"trained": 2, "saved": 0, "dropped:lost_lineage": 4, "open": 2}
    assert ledger.audit() == []
    ledger.train_group(3, ["3/0", "3/1"], 2)


@given(version=st.integers(0, 50), ancestor=st.integers(0, 50), steps=st.integers(0, 50))
def test_the_distance_to_lost_weights_goes_through_the_common_ancestor(version: int, ancestor: int, steps: int) -> None:
    trained = ancestor + steps
    distance = trained - rebase_version(version, ancestor=ancestor)
    assert distance == trained - min(version, ancestor) + max(version - ancestor, 0)
    assert rebase_version(rebase_version(version, ancestor=ancestor), ancestor=ancestor) == rebase_version(
        version, ancestor=ancestor
    )


@pytest.mark.parametrize(("second", "expected"), [(6, 3), (5, 3), (4, 1), (2, -3)])
def test_a_second_restore_beyond_the_first_never_brings_lost_weights_closer(second: int, expected: int) -> None:
    # Version 7 was lost by a restore to 5 (so it counts as 3) and came with a partial into the lineage from 5.
    assert rebase_version(3, ancestor=second, base=5) == expected
