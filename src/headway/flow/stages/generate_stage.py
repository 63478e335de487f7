"""generate: starts groups as fast as headway lets it. The work itself is done by the rollout loop's agents."""

from __future__ import annotations

from headway.flow.pipeline import Pipeline
from headway.flow.stage import Stage, register_stage
from headway.flow.staleness_controller import Headway
from headway.types import EpisodeGroup, Task


@register_stage("generate")
class GenerateStage(Stage[Task, EpisodeGroup]):
    """Consumes: tasks. Produces: episode groups. Waits for: a slot, then a task. Ends when: the tasks end."""

    consumes = Task
    produces = EpisodeGroup

    def __init__(self, line: Pipeline) -> None:
        super().__init__(line)
        line.on_generated = self._emit
        self._feeder = FEEDERS[line.settings.rollout_scheduling](line.headway)

    async def loop(self) -> None:
        while True:
            await self._slot()
            task = await self.next_item()
            if task is None:
                return
            await self._slot()  # the line may have moved on while we waited for a task
            self._feeder.started()
            self.line.start_group(task)

    async def _slot(self) -> None:
        """Until a group may start. The stage runs as long as groups are on their way."""
        headway = self.line.headway
        while not self._feeder.may_start():
            self._show()
            with self.line.waits.waiting(self.role, f"a slot ({headway.outstanding} taken)", "param_update"):
                await headway.changed.wait()
        self._show()

    def _show(self) -> None:
        self._running = int(self.line.headway.flying > 0)
        self._listening = 1 - self._running
        self.settle()

    def _emit(self, group: EpisodeGroup) -> None:
        assert self.outbound is not None
        self.outbound.put(group)


class QueueFeeder:
    """A free slot takes the next prompt at once."""

    def __init__(self, headway: Headway) -> None:
        self._headway = headway

    def may_start(self) -> bool:
        """Whether a group may start now."""
        return self._headway.may_start()

    def started(self) -> None:
        """One did."""


class BatchFeeder(QueueFeeder):
    """A whole batch starts together, and nothing more until all of it is in: the naive way, as a baseline."""

    def __init__(self, headway: Headway) -> None:
        super().__init__(headway)
        self._left = 0

    def may_start(self) -> bool:
        if not super().may_start():
            return False
        if self._left == 0 and self._headway.flying == 0:
            self._left = self._headway.slots - self._headway.outstanding
        return self._left > 0

    def started(self) -> None:
        self._left -= 1


FEEDERS = {"queue": QueueFeeder, "batch": BatchFeeder}
