"""The generate stage: starts groups as fast as the staleness controller allows. The rollout loop does the work."""

from headway.flow.pipeline import Pipeline
from headway.flow.stage import Stage, register_stage
from headway.flow.staleness_controller import Headway
from headway.types import EpisodeGroup, Task


@register_stage("generate")
class GenerateStage(Stage[Task, EpisodeGroup]):
    """Consumes: tasks. Produces: episode groups. Waits for: a slot, then a task. Ends when: the tasks end."""

    consumes = Task
    produces = EpisodeGroup

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        pipeline.deliver_generated_groups_to(self._emit)
        self._feeder = FEEDERS[pipeline.settings.rollout_scheduling](pipeline.headway)

    async def loop(self) -> None:
        while True:
            await self._wait_for_slot()
            task = await self.next_item()
            if task is None:
                return
            await self._wait_for_slot()  # another group may have taken the slot while we waited for a task
            self._feeder.started()
            self.pipeline.start_group(task)

    async def _wait_for_slot(self) -> None:
        """Wait until a group may start. The stage counts as running while groups are in flight."""
        headway = self.pipeline.headway
        while not self._feeder.may_start():
            self._show_state()
            with self.pipeline.waits.waiting(self.role, f"a slot ({headway.outstanding} taken)", "param_update"):
                await headway.changed.wait()
        self._show_state()

    def _show_state(self) -> None:
        self._running = int(self.pipeline.headway.in_flight > 0)
        self._listening = 1 - self._running
        self.settle()

    def _emit(self, group: EpisodeGroup) -> None:
        assert self.outbound is not None
        self.outbound.put(group)


class QueueFeeder:
    """Starts the next prompt as soon as a slot is free."""

    def __init__(self, headway: Headway) -> None:
        self._headway = headway

    def may_start(self) -> bool:
        return self._headway.may_start()

    def started(self) -> None:
        """Note that a group has started."""


class BatchFeeder(QueueFeeder):
    """Starts a whole batch together and nothing more until all of it is done: the naive baseline."""

    def __init__(self, headway: Headway) -> None:
        super().__init__(headway)
        self._left = 0

    def may_start(self) -> bool:
        if not super().may_start():
            return False
        if self._left == 0 and self._headway.in_flight == 0:
            self._left = self._headway.slots - self._headway.outstanding
        return self._left > 0

    def started(self) -> None:
        self._left -= 1


FEEDERS = {"queue": QueueFeeder, "batch": BatchFeeder}
