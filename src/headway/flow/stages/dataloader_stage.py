"""dataloader: gives tasks out, those that were put back first."""

from __future__ import annotations

from headway.flow.stage import Stage, register_stage
from headway.types import Task


@register_stage("dataloader")
class DataloaderStage(Stage[Task, Task]):
    """Consumes: the cursor. Produces: tasks. Waits for: room, or a position put back. Ends when: never by itself;
    at the end of the source it waits for what may still come back."""

    consumes = produces = Task

    async def next_item(self) -> Task | None:
        self.settle(listening=1)
        try:
            while (task := self.line.cursor.next()) is None:
                self.line.exhausted = True
                self.line.headway.changed.notify()
                with self.line.waits.waiting(self.role, "a position put back (the source is at its end)", "headway"):
                    await self.line.requeued.wait()
            self.line.exhausted = False
            self.line.given_out += 1
            return task
        finally:
            self._listening -= 1

    async def process(self, item: Task) -> Task:
        return item
