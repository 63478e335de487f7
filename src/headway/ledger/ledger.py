"""The ledger: every started sample ends in exactly one state, trained, dropped(reason) or saved.

Guarantees, against `kill -9` at any time: a finished sample that was flushed is not lost, none is trained twice, no
group is trained partly, and every task that was given out is trained or dropped for good exactly once, or is given out
again (`task_coverage`). A broken rule raises `LedgerError` at the call that broke it, checked against what is held in
memory, and changes nothing.

Entries are buffered and written in one transaction per flush. `defer` is called with the flush when the first entry
waits (an event loop's `call_soon` makes one transaction of everything in one iteration); without it every entry is a
transaction. If a flush fails, nothing of it is in the file and all of it is kept; a deferred flush that failed is tried
again, and raises, at the next entry. Flush before a trainer's checkpoint is written, so that the checkpoint never knows
more than the ledger.

The ledger decides nothing: what to train, to drop or to regenerate is decided by the scheduler.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headway.errors import LedgerError
from headway.ledger.ledger_records import encode_episode, encode_generation, encode_grades
from headway.ledger.ledger_restore import RestoredRun, drop_groups, find_damaged_groups, read_restored, rewind
from headway.ledger.ledger_state import LedgerState, OpenGroup, OpenSample, check_intact, count_ends, find_problems
from headway.ledger.ledger_store import Journal, open_store, report_damage
from headway.ledger.task_coverage import read_coverage
from headway.types import DropReason, Episode, Generation, Score


class Ledger:
    """The record of all samples of a run, for one process and one thread. The module states its guarantees."""

    def __init__(self, path: Path | str, *, defer: Callable[[Callable[[], None]], object] | None = None) -> None:
        db, self._lock = open_store(path)
        self._path = path
        self._journal = Journal(db, path, defer)
        try:
            with report_damage(path):
                self._state = LedgerState(db)
        except LedgerError:
            db.close()
            if self._lock is not None:
                self._lock.release()
            raise

    # The life of a sample

    def start_group(self, group_id: int, position: int) -> None:
        """Start a group for the task at `position`, which has no other group that is open or has ended for good.

        Ids must grow, so that none is used twice.
        """
        state = self._state
        if group_id < state.next_group_id:
            raise LedgerError(f"group {group_id} cannot start: ids up to {state.next_group_id - 1} have been used")
        state.coverage.take(position)
        state.next_group_id = group_id + 1
        state.groups[group_id] = OpenGroup(group_id, position)
        self._journal.groups.append((group_id, position))
        self._journal.schedule_flush()

    def start_sample(self, sample_id: str, group_id: int) -> None:
        """Start a member of an open group."""
        state = self._state
        group = self._get_group(group_id)
        if sample_id in state.samples or sample_id in group.dropped:
            raise LedgerError(f"sample {sample_id} of group {group_id} was started before")
        row = state.next_row
        state.next_row = row + 1
        state.samples[sample_id] = group.add(sample_id, row)
        self._journal.samples.append((row, sample_id, group_id))
        self._journal.schedule_flush()

    def finish_sample(self, episode: Episode) -> None:
        """Record a finished sample. From the next flush on it survives any crash."""
        sample = self._get_unfinished(episode.sample_id)
        body = encode_episode(episode)
        self._journal.payloads.append((sample.row, sample.group.group_id, self._state.lineage, body))
        sample.finished = True
        if sample.has_partial:
            sample.has_partial = False
            self._journal.spent_partials.append((sample.row,))
        self._journal.schedule_flush()

    def grade_group(self, group_id: int, grades: Sequence[tuple[str, Score, float]]) -> None:
        """Record scores and advantages of finished members as (sample id, score, advantage); replaces earlier ones."""
        group = self._get_group(group_id)
        for sample_id, _, _ in grades:
            sample = group.open.get(sample_id)
            if sample is None or not sample.finished:
                raise LedgerError(f"sample {sample_id} is no finished member of group {group_id} and has no grade")
        self._journal.grades.append((group_id, encode_grades(grades)))
        group.graded = True
        self._journal.schedule_flush()

    def train_group(self, group_id: int, sample_ids: Sequence[str], version: int) -> None:
        """Record that the training step of `version` used the group: all its members that were not dropped."""
        group = self._get_group(group_id)
        self._check_trainable(group_id, group, sample_ids, version)
        self._state.unpruned.setdefault(version, []).append(group.members)
        self._state.add_ends("trained", len(group.open))
        self._end_group(group, "trained", None, version)

    def drop_sample(self, sample_id: str, reason: DropReason) -> None:
        """End one member with `reason`. Its group goes on."""
        sample = self._get_sample(sample_id)
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
        self._journal.schedule_flush()

    def drop_group(self, group_id: int, reason: DropReason) -> list[str]:
        """End a group and every member that is still open with `reason`. Returns their ids."""
        group = self._get_group(group_id)
        samples = group.open.values()
        self._journal.spent_partials.extend([(sample.row,) for sample in samples if sample.has_partial])
        if any(sample.finished for sample in samples):
            self._journal.spent_groups.append(group.members)
        if group.graded:
            self._journal.spent_grades.append((group_id,))
        self._state.add_ends(f"dropped:{reason}", len(samples))
        if reason.regenerates:
            self._state.coverage.give_back(group.position)
        self._end_group(group, "dropped", str(reason), None)
        return list(group.open)

    # Stopping and resuming

    def store_partials(self, partials: Mapping[str, Generation]) -> None:
        """Store partial results of unfinished samples, without ending them; replaces earlier ones."""
        samples = [self._get_unfinished(sample_id) for sample_id in partials]
        bodies = [encode_generation(generation) for generation in partials.values()]
        for sample, body in zip(samples, bodies, strict=True):
            self._journal.partials.append((sample.row, self._state.lineage, body))
            sample.has_partial = True
        self._journal.schedule_flush()

    def save_open(self, partials: Mapping[str, Generation]) -> list[str]:
        """Stop gracefully: every sample without an end becomes `saved`, finished or not. Flushes; returns their ids.

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
        """Record that the state of `version` is on disk, and prune the payloads that it was trained on. Flushes."""
        state = self._state
        self._journal.checkpoints.append((version, directory))
        for trained in [trained for trained in state.unpruned if trained <= version]:
            groups = state.unpruned.pop(trained)
            self._journal.spent_groups.extend(groups)
            self._journal.spent_grades.extend([(group_id,) for _, _, group_id in groups])
        state.checkpointed = max(version, state.checkpointed)
        self.flush()

    def last_checkpoint(self) -> tuple[int, str] | None:
        """Return version and directory of the newest checkpoint, if there is one."""
        return next(iter(self.checkpoints()), None)

    def checkpoints(self) -> list[tuple[int, str]]:
        """Return version and directory of every checkpoint of this branch, the newest first.

        `restore` may go back to any of them; what only newer ones contain is generated again.
        """
        self.flush()
        found = self._journal.db.execute("SELECT version, directory FROM checkpoints ORDER BY version DESC")
        return [(int(version), str(directory)) for version, directory in found]

    def forget_checkpoint(self, version: int) -> None:
        """Record that the checkpoint `version` is no longer on disk. Flushes.

        The ledger keeps what a restore needs for the newest checkpoint only, so nothing else changes.
        """
        newest = self.last_checkpoint()
        if newest is None or version >= newest[0]:
            raise LedgerError(f"checkpoint {version} cannot be forgotten: no newer one is on disk")
        self._journal.forgotten.append((version,))
        self.flush()

    @property
    def run(self) -> str:
        """Identity of this run, which stays when its directory is moved."""
        (found,) = self._journal.db.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()
        return str(found)

    def restore(self, version: int) -> RestoredRun:
        """Go back to the trainer's checkpoint `version`, in a new process or in this one when its trainer was lost.

        Samples trained after `version` are finished and untrained again, and saved ones are open again. An action
        made by a version v > `version` came from weights that no longer exist; its distance to weights trained from
        now on goes through the common ancestor, so it is renumbered to 2·`version` − v for good: `trained` minus
        that number is the true distance, and the staleness bound stays provable (see `headway.ledger.ledger_restore`).

        Only what is returned may go on. What is in flight in this process must be stored with `store_partials`
        before, or is generated again. The file is checked first; a damaged one is refused untouched with `LedgerError`.
        A group whose stored record is damaged is dropped and generated again.
        """
        self.flush()
        db = self._journal.db
        with report_damage(self._path):
            check_intact(db)
            self._journal.transact(lambda db: rewind(db, version))
            damaged = find_damaged_groups(db)
            if damaged:
                self._journal.transact(lambda db: drop_groups(db, damaged, DropReason.DAMAGED_RECORD))
            self._state = LedgerState(db)
            return read_restored(db, self._state.coverage, damaged)

    # Inspection

    def counts(self) -> Mapping[str, int]:
        """Count samples by state: `trained`, `saved`, `open`, and `dropped:<reason>` for every reason there was."""
        return {"trained": 0, "saved": 0, **self._state.ends, "open": len(self._state.samples)}

    def audit(self) -> list[str]:
        """Return everything that is wrong with the file, in words. Reads all of it."""
        self.flush()
        stored, held = count_ends(self._journal.db), self.counts()
        covered, known = read_coverage(self._journal.db).describe(), self._state.coverage.describe()
        problems = find_problems(self._journal.db)
        if covered != known:
            problems.append(f"{covered} in the file, {known} in memory")
        return problems + [
            f"{state}: {stored.get(state, 0)} samples in the file, {held.get(state, 0)} in memory"
            for state in sorted(stored.keys() | held.keys())
            if stored.get(state, 0) != held.get(state, 0)
        ]

    def flush(self) -> None:
        """Write everything buffered in one transaction. Raises `LedgerError` if that fails, and writes nothing."""
        self._journal.flush()

    def close(self) -> None:
        """Flush and release the lock. A flush that fails leaves the ledger open, so that nothing is lost."""
        self._journal.close()
        if self._lock is not None:
            self._lock.release()

    def _get_group(self, group_id: int) -> OpenGroup:
        group = self._state.groups.get(group_id)
        if group is None:
            raise LedgerError(f"group {group_id} is not open: it was never started, or it has ended")
        return group

    def _get_sample(self, sample_id: str) -> OpenSample:
        sample = self._state.samples.get(sample_id)
        if sample is None:
            raise LedgerError(f"sample {sample_id} is not open: it was never started, or it has ended")
        return sample

    def _get_unfinished(self, sample_id: str) -> OpenSample:
        sample = self._get_sample(sample_id)
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
        """Give the group and every open member the same end."""
        if group.open:
            self._journal.member_ends.append((end, reason, version, *group.members))
            self._journal.members_ended += len(group.open)
        self._journal.group_ends.append((end, reason, version, group.group_id))
        del self._state.groups[group.group_id]
        samples = self._state.samples
        for sample_id in group.open:
            del samples[sample_id]
        self._journal.schedule_flush()
