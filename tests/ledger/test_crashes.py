"""Any history of a run, with crashes anywhere, against a model in plain dictionaries.

The model knows every version as a node of the tree of weights, so that the distance between the weights that made
an action and those now trained is counted on the tree and compared with what the ledger's numbers say.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headway.ledger import Ledger, RestoredRun
from headway.types import DropReason, Generation, Score

from .factory import killed_copy, make_episode, make_generation


@dataclass
class ModelSample:
    group_id: int
    end: str | None = None
    trained_at: int | None = None
    finished: bool = False
    made: list[tuple[int, int]] = field(default_factory=list)
    """(version as the system numbers it, node of the tree) of each action so far."""
    kept: list[tuple[int, int]] | None = None
    """The same, of the stored partial."""


@dataclass
class ModelGroup:
    position: int
    end: str | None = None
    reason: DropReason | None = None
    trained_at: int | None = None
    pruned: bool = False


@dataclass
class Model:
    """What the ledger must know."""

    groups: dict[int, ModelGroup] = field(default_factory=dict)
    samples: dict[str, ModelSample] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    line: list[int] = field(default_factory=lambda: [0])
    """Node of each version of the surviving line."""
    restores: list[int] = field(default_factory=list)
    fell_back: bool = False
    """A restore went back beyond an earlier one: distances are then bounds, not exact."""

    def members(self, group_id: int, *, alive: bool = True) -> dict[str, ModelSample]:
        return {
            sample_id: sample
            for sample_id, sample in self.samples.items()
            if sample.group_id == group_id and not (alive and sample.end)
        }

    def open_groups(self) -> list[int]:
        return [group_id for group_id, group in self.groups.items() if group.end is None]

    def restore(self, version: int) -> None:
        self.fell_back |= version < max(self.restores, default=0)
        self.restores.append(version)
        self.line = self.line[: version + 1]
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint <= version]
        for sample in self.samples.values():
            if sample.end == "saved" or (sample.trained_at or 0) > version:
                sample.end = sample.trained_at = None
            if not sample.finished and sample.end is None:
                sample.made = list(sample.kept or [])
        for group_id, group in self.groups.items():
            if (group.trained_at or 0) > version:
                group.end = group.trained_at = None
                if group.pruned:
                    drop(self, group_id, DropReason.LOST_LINEAGE)


def drop(model: Model, group_id: int, reason: DropReason) -> None:
    for sample in model.members(group_id).values():
        sample.end = f"dropped:{reason}"
    model.groups[group_id].end, model.groups[group_id].reason = "dropped", reason


class Run:
    """A random scheduler that drives a ledger and its model, and crashes."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        self.path = directory / "0" / "ledger.db"
        self.ledger = Ledger(self.path, defer=lambda flush: None)
        self.model = Model()
        self.flushed = copy.deepcopy(self.model)
        self.parents: list[tuple[int, int]] = [(-1, 0)]
        """(parent, depth) of each node of the tree of weights."""
        self.crashes = 0
        self.next_group_id = 0

    # What a scheduler does.

    def start(self) -> None:
        positions = {group.position for group in self.model.groups.values()}
        pending = self.pending()
        position = self.rng.choice(pending) if pending and self.rng.random() < 0.7 else max(positions, default=-1) + 1
        group_id = self.next_group_id
        self.next_group_id += 1
        self.model.groups[group_id] = ModelGroup(position)
        self.ledger.start_group(group_id, position)
        for _ in range(self.rng.randrange(4)):
            self.start_member(group_id)

    def start_member(self, group_id: int | None = None) -> None:
        group_id = self.pick(self.model.open_groups()) if group_id is None else group_id
        if group_id is not None:
            sample_id = f"{group_id}/{len(self.model.members(group_id, alive=False))}"
            self.model.samples[sample_id] = ModelSample(group_id)
            self.ledger.start_sample(sample_id, group_id)

    def make_actions(self) -> None:
        for sample_id in self.unfinished():
            if self.rng.random() < 0.5:
                served = self.rng.randrange(max(self.model.restores[-1:], default=0), len(self.model.line))
                self.model.samples[sample_id].made.append((served, self.model.line[served]))

    def finish(self) -> None:
        for sample_id in self.unfinished():
            if self.rng.random() < 0.6:
                sample = self.model.samples[sample_id]
                if not sample.made:
                    sample.made.append((len(self.model.line) - 1, self.model.line[-1]))
                sample.finished, sample.kept = True, None
                self.ledger.finish_sample(make_episode(sample_id, *(version for version, _ in sample.made)))

    def grade(self) -> None:
        group_id = self.pick(self.model.open_groups())
        if group_id is not None:
            done = [sample_id for sample_id, sample in self.model.members(group_id).items() if sample.finished]
            self.ledger.grade_group(group_id, [(sample_id, Score(value=1.0), 0.5) for sample_id in done])

    def train(self) -> None:
        ready = [
            group_id
            for group_id in self.model.open_groups()
            if (members := self.model.members(group_id)) and all(sample.finished for sample in members.values())
        ]
        if not ready:
            return
        version = len(self.model.line)
        self.parents.append((self.model.line[-1], version))
        self.model.line.append(len(self.parents) - 1)
        for group_id in self.rng.sample(ready, self.rng.randrange(1, len(ready) + 1)):
            members = self.model.members(group_id)
            self.ledger.train_group(group_id, list(members), version)
            for sample in members.values():
                sample.end, sample.trained_at = "trained", version
            self.model.groups[group_id].end, self.model.groups[group_id].trained_at = "trained", version

    def drop_sample(self) -> None:
        sample_id = self.pick([sample_id for sample_id, sample in self.model.samples.items() if sample.end is None])
        if sample_id is not None:
            self.model.samples[sample_id].end = f"dropped:{DropReason.SURPLUS_MEMBER}"
            self.ledger.drop_sample(sample_id, DropReason.SURPLUS_MEMBER)

    def drop_group(self) -> None:
        group_id = self.pick(self.model.open_groups())
        if group_id is not None:
            reason = self.rng.choice(list(DropReason))
            assert self.ledger.drop_group(group_id, reason) == list(self.model.members(group_id))
            drop(self.model, group_id, reason)

    def keep(self, share: float = 0.5) -> dict[str, Generation]:
        partials = {}
        for sample_id in self.unfinished():
            if self.rng.random() < share:
                sample = self.model.samples[sample_id]
                sample.kept = list(sample.made)
                partials[sample_id] = make_generation(*(version for version, _ in sample.made))
        return partials

    def store_partials(self) -> None:
        self.ledger.store_partials(self.keep())

    def checkpoint(self) -> None:
        version = len(self.model.line) - 1
        self.model.checkpoints.append(version)
        for group in self.model.groups.values():
            group.pruned |= group.end == "trained"
        self.ledger.checkpoint(version, f"c{version}")
        self.flushed = copy.deepcopy(self.model)

    def flush(self) -> None:
        self.ledger.flush()
        self.flushed = copy.deepcopy(self.model)

    # What happens to it.

    def crash(self) -> None:
        self.crashes += 1
        path = killed_copy(self.path, self.directory / str(self.crashes))
        self.ledger.close()  # writes to the old file, which nobody reads again
        self.path, self.ledger = path, Ledger(path, defer=lambda flush: None)
        self.model = copy.deepcopy(self.flushed)
        self.restore()

    def stop_and_go_on(self) -> None:
        alive = [sample_id for sample_id, sample in self.model.samples.items() if sample.end is None]
        assert self.ledger.save_open(self.keep(1.0)) == alive
        for sample_id in alive:
            self.model.samples[sample_id].end = "saved"
        self.check_counts()
        assert self.ledger.audit() == []
        self.ledger.close()
        self.ledger = Ledger(self.path, defer=lambda flush: None)
        self.restore()

    def lose_trainer(self) -> None:
        self.ledger.store_partials(self.keep(1.0))
        self.restore()

    def restore(self) -> None:
        last = self.model.checkpoints[-1] if self.model.checkpoints else 0
        version = last
        if self.rng.random() < 0.3:  # the trainer's checkpoint was written, the ledger not told
            version = self.rng.randrange(last, len(self.model.line))
        elif self.rng.random() < 0.2:  # the newest checkpoint cannot be read
            version = self.rng.choice([0, *self.model.checkpoints])
        restored = self.ledger.restore(version)
        self.model.restore(version)
        self.flushed = copy.deepcopy(self.model)
        self.check_restored(restored)

    # What must hold.

    def check_restored(self, restored: RestoredRun) -> None:
        model = self.model
        assert restored.cursor == max((group.position for group in model.groups.values()), default=-1) + 1
        assert restored.next_group_id == max(model.groups, default=-1) + 1
        assert restored.pending == tuple(self.pending())
        assert restored.lineage == len(model.restores)
        assert [group.group_id for group in restored.groups] == model.open_groups()
        self.next_group_id = restored.next_group_id
        for group in restored.groups:
            members = model.members(group.group_id)
            assert list(group.episodes) == [name for name, sample in members.items() if sample.finished]
            assert group.open == tuple(name for name, sample in members.items() if not sample.finished)
            assert group.members_started == len(model.members(group.group_id, alive=False))
            assert group.grades.keys() <= group.episodes.keys()
            assert group.partials.keys() == {
                name for name, sample in members.items() if not sample.finished and sample.kept is not None
            }
            for name, record in [*group.episodes.items(), *group.partials.items()]:
                self.check_distances(members[name], record)
        self.check_counts()
        assert self.ledger.audit() == []

    def check_distances(self, sample: ModelSample, record: Any) -> None:
        numbers = [run.version for run in record.runs for _ in range(run.count)]
        assert len(numbers) == len(sample.made)
        trained = len(self.model.line) - 1
        for number, (_, node) in zip(numbers, sample.made, strict=True):
            distance = self.distance(node, self.model.line[-1])
            assert trained - number >= distance
            assert self.model.fell_back or trained - number == distance
        sample.made = [(number, node) for number, (_, node) in zip(numbers, sample.made, strict=True)]
        if sample.kept is not None:
            sample.kept = list(sample.made)

    def distance(self, one: int, other: int) -> int:
        steps = 0
        while one != other:
            if self.parents[one][1] >= self.parents[other][1]:
                one = self.parents[one][0]
            else:
                other = self.parents[other][0]
            steps += 1
        return steps

    def check_counts(self) -> None:
        expected = {"trained": 0, "saved": 0, "open": 0}
        for sample in self.model.samples.values():
            state = sample.end or "open"
            expected[state] = expected.get(state, 0) + 1
        assert self.ledger.counts() == expected

    # Small things.

    def pending(self) -> list[int]:
        latest = {group.position: group for group in self.model.groups.values()}
        return sorted(
            position for position, group in latest.items() if group.reason is not None and group.reason.regenerates
        )

    def unfinished(self) -> list[str]:
        return [name for name, sample in self.model.samples.items() if sample.end is None and not sample.finished]

    def pick(self, choices: list[Any]) -> Any:
        return self.rng.choice(choices) if choices else None


USUAL = [
    "start",
    "start",
    "start_member",
    "make_actions",
    "make_actions",
    "finish",
    "finish",
    "grade",
    "train",
    "train",
]
RARE = ["drop_sample", "drop_group", "store_partials", "checkpoint", "flush", "flush"]
TROUBLE = ["crash", "crash", "stop_and_go_on", "lose_trainer"]


def drive(directory: Path, seed: int, steps: int) -> None:
    run = Run(directory, seed)
    for _ in range(steps):
        kind = run.rng.choices([USUAL, RARE, TROUBLE], [10, 4, 1])[0]
        getattr(run, run.rng.choice(kind))()
        run.check_counts()
    run.flush()
    assert run.ledger.audit() == []
    run.crash()
    run.ledger.close()


@pytest.mark.parametrize("seed", range(25))
def test_any_history_with_crashes_agrees_with_the_model(tmp_path: Path, seed: int) -> None:
    drive(tmp_path, seed, 120)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_long_histories_with_crashes_agree_with_the_model(tmp_path: Path, seed: int) -> None:
    drive(tmp_path, seed, 400)
