"""Records samples in the ledger and in the event log together, so that the two never disagree."""

from collections.abc import Sequence

from headway.ledger import Ledger
from headway.monitor.event_log import EventLog
from headway.monitor.events import GroupDrop, GroupStart, SampleEnd
from headway.types import DropReason, Episode, SampleGroup


class SampleRecorder:
    """Records the start, the end and the grade of samples and groups."""

    def __init__(self, ledger: Ledger, events: EventLog) -> None:
        self.ledger = ledger
        self._events = events

    def start_group(self, group_id: int, position: int, served: int) -> None:
        self.ledger.start_group(group_id, position)
        self._events.emit(GroupStart(who="generate", group=group_id, position=position, served=served))

    def start_sample(self, sample_id: str, group_id: int) -> None:
        self.ledger.start_sample(sample_id, group_id)

    def finish_sample(self, episode: Episode) -> None:
        self.ledger.finish_sample(episode)

    def drop_sample(self, sample_id: str, reason: DropReason) -> None:
        self.ledger.drop_sample(sample_id, reason)
        self._events.emit(SampleEnd(who="generate", sample=sample_id, end="dropped", reason=str(reason)))

    def grade(self, group: SampleGroup) -> None:
        grades = [(s.sample_id, s.score, s.advantage) for s in group.samples if s.score is not None]
        self.ledger.grade_group(group.group_id, grades)

    def drop_group(self, group_id: int, reason: DropReason, who: str) -> None:
        for sample_id in self.ledger.drop_group(group_id, reason):
            self._events.emit(SampleEnd(who=who, sample=sample_id, end="dropped", reason=str(reason)))
        self._events.emit(GroupDrop(who=who, group=group_id, reason=str(reason)))

    def train(self, groups: Sequence[SampleGroup], made: int) -> None:
        for group in groups:
            ids = [sample.sample_id for sample in group.samples]
            self.ledger.train_group(group.group_id, ids, made)
            for sample_id in ids:
                self._events.emit(SampleEnd(who="train", sample=sample_id, end="trained"))
