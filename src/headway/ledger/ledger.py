"""The ledger: every started sample ends in exactly one state, trained, dropped(reason) or saved.

Guarantees, against `kill -9` at any time: a finished sample that was flushed is not lost, none is trained twice, no
group is trained partly, and the cursor into the source follows from what was started. A broken rule raises
`LedgerError` at the call that broke it, checked against what is held in memory, and changes nothing.

Entries are buffered and written in one transaction per flush: `defer` is handed the flush with the first entry
that waits (an event loop's `call_soon` makes one transaction of everything an iteration has to say); without it
every entry is a transaction. When a flush fails, nothing of it is in the file and all of it is kept; a deferred
flush that failed is tried again, and raises, at the next entry. Flush before a trainer's checkpoint is written, so
that it never knows more than the ledger does.

Does not decide anything: what to train, to drop or to regenerate is the scheduler's part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headway.errors import LedgerError
from headway.ledger.ledger_records import encode_episode, encode_generation
from headway.ledger.ledger_restore import RestoredRun, read_restored, rewind
from headway.ledger.ledger_state import LedgerState, OpenGroup, OpenSample, count_ends, find_problems
from headway.ledger.ledger_store import Journal, open_store
from headway.types import DropReason, Episode, Generation, Score


class Ledger:
    """The run's book of samples. One process, one thread; see the module for what it promises."""

    def __init__(self, path: Path | str, *, defer: Callable[[Callable[[], None]], object] | None = None) -> None:
        db, self._lock = open_store(path)
        self._journal = Journal(db, path, defer)
        self._state = LedgerState(db)

    # A sample's life.

    def start_group(self, group_id: int, position: int) -> None:
        """A group begins, for the task at `position`. Ids grow: that is how none is used twice."""
        state = self._state
        if group_id < state.next_group_id:
            raise LedgerError(f"group {group_id} cannot start: ids up to {state.next_group_id - 1} have been used")
        state.next_group_id = group_id + 1
        state.groups[group_id] = OpenGroup(group_id)
        self._journal.groups.append((group_id, position))
        self._journal.changed()

    def start_sample(self, sample_id: str, group_id: int) -> None:
        """A member of an open group begins."""
        state = self._state
        group = self._group(group_id)
        if sample_id in state.samples or sample_id in group.dropped:
            raise LedgerError(f"sample {sample_id} of group {group_id} was started before")
        row = state.next_row
        state.next_row = row + 1
        state.samples[sample_id] = group.add(sample_id, row)
        self._journal.samples.append((row, sample_id, group_id))
        self._journal.changed()

    def finish_sample(self, episode: Episode) -> None:
        """The sample was made; from the next flush on it is not lost, whatever dies."""
        sample = self._unfinished(episode.sample_id)
        body = encode_episode(episode)
        self._journal.payloads.append((sample.row, sample.group.group_id, self._state.lineage, body))
        sample.finished = True
        if sample.has_partial:
            sample.has_partial = False
            self._journal.spent_partials.append((sample.row,))
        self._journal.changed()

    def grade_group(self, group_id: int, grades: Sequence[tuple[str, Score, float]]) -> None:
        """Scores and advantages of finished members, as (sample id, score, advantage); replaces earlier ones."""
        group = self._group(group_id)
        for sample_id, _, _ in grades:
            sample = group.open.get(sample_id)
            if sample is None or not sample.finished:
                raise LedgerError(f"sample {sample_id} is no finished member of group {group_id} and has no grade")
        body = json.dumps([(sample_id, score.value, dict(score.parts), adv) for sample_id, score, adv in grades])
        self._journal.grades.append((group_id, body))
        group.graded = True
        self._journal.changed()

    def train_group(self, group_id: int, sample_ids: Sequence[str], version: int) -> None:
        """The group was part of the training step that made `version`; it must be all members not dropped."""
        group = self._group(group_id)
        self._check_trainable(group_id, group, sample_ids, version)
        self._state.unpruned.setdefault(version, []).append(group.members)
        self._state.add_ends("trained", len(group.open))
        self._end_group(group, "trained", None, version)

    def drop_sample(self, sample_id: str, reason: DropReason) -> None:
        """One member ends with `reason`; its group goes on."""
        sample = self._sample(sample_id)
        group = sample.group
        del group.open[sample_id]
        group.dropped.add(sample_id)
        del self._state.samples[sample_id]
        self._state.add_ends(f"dropped:{reason}", 1)
        self._journal.sample_ends.append(("dropped", str(reason), sample.row))
        if sample.finished:
            self._journal.spent_payloads.append((sample.row,))
        if sample.has_partial:
            self._journal.spent_partials.append((sample.row,))
        self._journal.changed()

    def drop_group(self, group_id: int, reason: DropReason) -> list[str]:
        """The group is over: every member still open ends with `reason`. Returns their ids."""
        group = self._group(group_id)
        samples = group.open.values()
        self._journal.spent_partials.extend([(sample.row,) for sample in samples if sample.has_partial])
        if any(sample.finished for sample in samples):
            self._journal.spent_groups.append(group.members)
        if group.graded:
            self._journal.spent_grades.append((group_id,))
        self._state.add_ends(f"dropped:{reason}", len(samples))
        self._end_group(group, "dropped", str(reason), None)
        return list(group.open)

    # Stopping and going on.

    def store_partials(self, partials: Mapping[str, Generation]) -> None:
        """Keep what unfinished samples have so far, without ending them; replaces what each had before."""
        samples = [self._unfinished(sample_id) for sample_id in partials]
        bodies = [encode_generation(generation) for generation in partials.values()]
        for sample, body in zip(samples, bodies, strict=True):
            self._journal.partials.append((sample.row, self._state.lineage, body))
            sample.has_partial = True
        self._journal.changed()

    def save_open(self, partials: Mapping[str, Generation]) -> list[str]:
        """A graceful stop: every sample without an end becomes `saved`, finished or not. Returns their ids; flushes.

        Only `restore` opens them again.
        """
        self.store_partials(partials)
        state = self._state
        saved = list(state.samples)
        self._journal.sample_ends.extend(("saved", None, sample.row) for sample in state.samples.values())
        state.add_ends("saved", len(saved))
        state.samples.clear()
        state.groups.clear()
        self.flush()
        return saved

    def checkpoint(self, version: int, directory: str) -> None:
        """The trainer's state at `version` is on disk: payloads it was trained on are let go. Flushes."""
        state = self._state
        self._journal.checkpoints.append((version, directory))
        for trained in [trained for trained in state.unpruned if trained <= version]:
            groups = state.unpruned.pop(trained)
            self._journal.spent_groups.extend(groups)
            self._journal.spent_grades.extend([(group_id,) for _, _, group_id in groups])
        state.checkpointed = max(version, state.checkpointed)
        self.flush()

    def last_checkpoint(self) -> tuple[int, str] | None:
        """Version and directory of the newest checkpoint, if there is one."""
        return next(iter(self.checkpoints()), None)

    def checkpoints(self) -> list[tuple[int, str]]:
        """Version and directory of every checkpoint of this line of versions, the newest first.

        `restore` may go back to any of them; what only newer ones know of is drawn again.
        """
        self.flush()
        found = self._journal.db.execute("SELECT version, directory FROM checkpoints ORDER BY version DESC")
        return [(int(version), str(directory)) for version, directory in found]

    def forget_checkpoint(self, version: int) -> None:
        """The checkpoint `version` is no longer on disk: nobody goes back to it. Flushes.

        What a restore needs is kept for the newest alone, so an older one takes nothing with it.
        """
        newest = self.last_checkpoint()
        if newest is None or version >= newest[0]:
            raise LedgerError(f"checkpoint {version} cannot be forgotten: no newer one is on disk")
        self._journal.forgotten.append((version,))
        self.flush()

    @property
    def run(self) -> str:
        """Tells what this run wrote from what others did, wherever its directory is moved to."""
        (found,) = self._journal.db.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()
        return str(found)

    def restore(self, version: int) -> RestoredRun:
        """Go on from the trainer's checkpoint `version`: in a new process, or in this one when its trainer was lost.

        Samples trained after `version` are finished and untrained again, and saved ones are open again. An action
        made by a version v > `version` came from weights that no longer exist; its distance to weights trained from
        now on goes through the common ancestor, so it is renumbered to 2·`version` − v, for good: `trained` minus
        that number is the true distance, and the staleness bound stays provable (see `headway.ledger.ledger_restore`).

        Only what is returned may go on: what is in flight in this process is stored with `store_partials` before,
        or made anew.
        """
        self.flush()
        self._journal.transact(lambda db: rewind(db, version))
        self._state = LedgerState(self._journal.db)
        return read_restored(self._journal.db)

    # Looking at it.

    def counts(self) -> Mapping[str, int]:
        """Samples by state: `trained`, `saved`, `open`, and `dropped:<reason>` for every reason there was."""
        return {"trained": 0, "saved": 0, **self._state.ends, "open": len(self._state.samples)}

    def audit(self) -> list[str]:
        """Everything that is wrong with the file, in words; empty when every promise was kept. Reads all of it."""
        self.flush()
        stored, held = count_ends(self._journal.db), self.counts()
        return find_problems(self._journal.db) + [
            f"{state}: {stored.get(state, 0)} samples in the file, {held.get(state, 0)} in memory"
            for state in sorted(stored.keys() | held.keys())
            if stored.get(state, 0) != held.get(state, 0)
        ]

    def flush(self) -> None:
        """Write everything buffered in one transaction, or nothing and a `LedgerError`."""
        self._journal.flush()

    def close(self) -> None:
        """Flush and let the next process in. A flush that fails leaves the ledger open, so that nothing is lost."""
        self._journal.close()
        if self._lock is not None:
            self._lock.release()

    # Inside.

    def _group(self, group_id: int) -> OpenGroup:
        group = self._state.groups.get(group_id)
        if group is None:
            raise LedgerError(f"group {group_id} is not open: it was never started, or it has ended")
        return group

    def _sample(self, sample_id: str) -> OpenSample:
        sample = self._state.samples.get(sample_id)
        if sample is None:
            raise LedgerError(f"sample {sample_id} is not open: it was never started, or it has ended")
        return sample

    def _unfinished(self, sample_id: str) -> OpenSample:
        sample = self._sample(sample_id)
        if sample.finished:
            raise LedgerError(f"sample {sample_id} is finished already")
        return sample

    def _check_trainable(self, group_id: int, group: OpenGroup, sample_ids: Sequence[str], version: int) -> None:
        members = group.open
        if not members or len(sample_ids) != len(members) or members.keys() != set(sample_ids):
            raise LedgerError(f"group {group_id} is trained whole or not at all: {sample_ids} is not {list(members)}")
        for sample_id, sample in members.items():
            if not sample.finished:
                raise LedgerError(f"sample {sample_id} cannot be trained: it is not finished")
        if version <= self._state.checkpointed:
            last = self._state.checkpointed
            raise LedgerError(f"group {group_id} cannot be part of version {version}: checkpoint {last} is on disk")

    def _end_group(self, group: OpenGroup, end: str, reason: str | None, version: int | None) -> None:
        """The same end for the group and for every member that has none."""
        if group.open:
            self._journal.member_ends.append((end, reason, version, *group.members))
            self._journal.members_ended += len(group.open)
        self._journal.group_ends.append((end, reason, version, group.group_id))
        del self._state.groups[group.group_id]
        samples = self._state.samples
        for sample_id in group.open:
            del samples[sample_id]
        self._journal.changed()
