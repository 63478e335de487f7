"""The dataloader stage: hands tasks out, those that were put back first.

It draws a task only when there is room for it. Tasks that were read ahead would start before a position that is put
back meanwhile, and a run that ends soon would never train it: the pipeline takes them back first.
"""

from headway.flow.stage import Stage, register_stage
from headway.types import Task

TASKS_READ_AHEAD = 16
"""Tasks that wait for a slot, so that groups start together when slots become free. One at a time cost 0.4 ms each."""


@register_stage("dataloader")
class DataloaderStage(Stage[Task, Task]):
    """Consumes: positions of the task source. Produces: tasks. Waits for: room in the channel; at the end of the
    source, a position that is put back. Ends when: the pipeline ends."""

    consumes = produces = Task

    async def loop(self) -> None:
        assert self.outbound is not None
        self.pipeline.take_back_tasks_from(self.outbound.drain)
        while True:
            if not self.outbound.has_room:
                self.settle(emitting=1)
                try:
                    await self.outbound.wait_for_room()
                finally:
                    self._emitting -= 1
            item = await self.next_item()
            assert item is not None, "the tasks never end here: a position may always be put back"
            await self._handle(item)

    async def next_item(self) -> Task | None:
        self.settle(listening=1)
        try:
            while (task := self._read_task()) is None:
                self.pipeline.exhausted = True
                self.pipeline.headway.changed.notify()
                what = "a position put back (the source is at its end)"
                with self.pipeline.waits.waiting(self.role, what, "train"):
                    await self.pipeline.requeued.wait()
            self.pipeline.exhausted = False
            self.pipeline.tasks_handed_out += 1
            return task
        finally:
            self._listening -= 1

    def _read_task(self) -> Task | None:
        with self.pipeline.waits.waiting(self.role, "the next task", "task source"):
            return self.pipeline.cursor.next()

    async def process(self, item: Task) -> Task:
        return item
