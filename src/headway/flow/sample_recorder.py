"""Records samples in the ledger and in the event log together, so that the two never disagree."""

from collections.abc import Iterable, Sequence

from headway.flow.sample_population import SamplePopulation
from headway.ledger import Ledger
from headway.monitor.event_log import EventLog
from headway.monitor.events import GroupDrop, GroupStart, SampleEnd
from headway.types import DropReason, Episode, SampleGroup


class SampleRecorder:
    """Records the start, the end and the grade of samples and groups."""

    def __init__(self, ledger: Ledger, events: EventLog, drawn_again: Iterable[int] = ()) -> None:
        """`drawn_again` are the positions of tasks that were dropped and will start once more."""
        self.ledger = ledger
        self.population = SamplePopulation(drawn_again)
        self._events = events

    def start_group(self, group_id: int, position: int, served: int) -> None:
        self.ledger.start_group(group_id, position)
        self.population.start_group(group_id, position)
        self._events.emit(GroupStart(who="generate", group=group_id, position=position, served=served))

    def start_sample(self, sample_id: str, group_id: int) -> None:
        self.ledger.start_sample(sample_id, group_id)
        self.population.start_sample(sample_id, group_id)

    def finish_sample(self, episode: Episode) -> None:
        self.ledger.finish_sample(episode)
        self.population.finish_sample(episode)

    def drop_sample(self, sample_id: str, reason: DropReason) -> None:
        self.ledger.drop_sample(sample_id, reason)
        self.population.drop_sample(sample_id, reason)
        self._events.emit(SampleEnd(who="generate", sample=sample_id, end="dropped", reason=str(reason)))

    def leave_sample(self, sample_id: str, length: int) -> None:
        self.population.leave_sample(sample_id, length)

    def grade(self, group: SampleGroup) -> None:
        grades = [(s.sample_id, s.score, s.advantage) for s in group.samples if s.score is not None]
        self.ledger.grade_group(group.group_id, grades)
        self.population.grade(group)

    def drop_group(self, group_id: int, position: int, reason: DropReason, who: str) -> None:
        for sample_id in self.ledger.drop_group(group_id, reason):
            self.population.drop_sample(sample_id, reason)
            self._events.emit(SampleEnd(who=who, sample=sample_id, end="dropped", reason=str(reason)))
        self.population.drop_group(group_id, position, reason)
        self._events.emit(GroupDrop(who=who, group=group_id, reason=str(reason)))

    def train(self, groups: Sequence[SampleGroup], made: int) -> None:
        for group in groups:
            ids = [sample.sample_id for sample in group.samples]
            self.ledger.train_group(group.group_id, ids, made)
            self.population.train(group)
            for sample_id in ids:
                self._events.emit(SampleEnd(who="train", sample=sample_id, end="trained"))
