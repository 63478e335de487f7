"""Holds groups back until a whole batch was drawn: the synchronous scoring of `with_reward: false`.

A batch is complete when the groups at the gate fill it together with those that have passed and are not trained yet,
such as the rest of a batch whose other groups taught nothing. If no group is generated and none can start, the gate
opens for fewer, so that it never stops a run.
"""

import asyncio

from headway.flow.pipeline import Pipeline


class BatchGate:
    """Lets groups pass a batch at a time. `watch` runs as long as groups come."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._passed: set[int] = set()

    async def wait(self, group_id: int) -> None:
        """Wait until the batch of this group was drawn, or the group was dropped."""
        self._passed.discard(group_id)  # it comes again where a member was generated anew
        opened = self._waiting[group_id] = asyncio.get_running_loop().create_future()
        self._pipeline.headway.changed.notify()
        await opened

    async def watch(self) -> None:
        """Open the gate whenever a batch is complete."""
        while True:
            await self._pipeline.headway.changed.until(self._may_open)
            for group_id, opened in self._waiting.items():
                self._passed.add(group_id)
                if not opened.done():
                    opened.set_result(None)
            self._waiting.clear()

    def _may_open(self) -> bool:
        self._forget_dropped()
        if not self._waiting:
            return False
        size = self._pipeline.settings.groups_per_step
        return len(self._waiting) >= size - len(self._passed) % size or not self._can_more_come()

    def _can_more_come(self) -> bool:
        """Return whether a group is being generated, is on its way here, or may start."""
        pipeline, headway = self._pipeline, self._pipeline.headway
        if any(not run.complete for run in pipeline.loop.runs.values()):
            return True
        if len(self._waiting) + len(self._passed) < headway.in_flight + headway.ready_count:
            return True
        if pipeline.exhausted or pipeline.settings.rollout_scheduling == "batch":  # the next batch waits for this one
            return False
        return headway.paused or headway.may_start()

    def _forget_dropped(self) -> None:
        """Let go of groups that were dropped or trained."""
        for group_id in [one for one in self._waiting if not self._pipeline.is_live(one)]:
            opened = self._waiting.pop(group_id)
            if not opened.done():
                opened.set_result(None)
        self._passed = {one for one in self._passed if self._pipeline.is_live(one)}
