"""validate: a second flow over the same hub. Same agents and rewards, no training, nothing in the ledger.

Runs beside training; with `pause_generation_for_validation` training requests are interrupted at an action
boundary first and go on, with what they have, afterwards.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headway.data.base import TaskSource
from headway.flow.line import Line
from headway.rollout.loop import GroupRun, RolloutLoop
from headway.rollout.replica import Lane
from headway.rollout.signal import Signal
from headway.rollout.tasks import OrderedTaskGroup, spawn
from headway.types import DropReason, Episode


class NoBook:
    """Validation samples are not written down."""

    def start_sample(self, sample_id: str, group_id: int) -> None: ...
    def finish_sample(self, episode: Episode) -> None: ...
    def drop_sample(self, sample_id: str, reason: DropReason) -> None: ...


class ValidationFlow:
    """Validates one version at a time."""

    def __init__(self, line: Line, tasks: TaskSource) -> None:
        self._line, self._tasks = line, tasks
        self._turn = asyncio.Lock()
        self.running = 0
        """Validations asked for and not done."""
        self.done = Signal()

    def start(self, trained: int) -> None:
        """Validate version `trained` as soon as it is served."""
        self.running += 1
        spawn(self._line.tasks, self._run(trained), f"validate/{trained}")

    async def _run(self, trained: int) -> None:
        line = self._line
        try:
            async with self._turn:
                with line.waits.waiting("validate", f"version {trained} to be served", "param_update"):
                    await line.headway.changed.until(lambda: line.headway.served >= trained)
                try:
                    if line.settings.pause_generation_for_validation:
                        line.headway.paused = True
                        await line.hub.pause(Lane.TRAIN)
                    await self._validate(trained)
                finally:
                    if line.settings.pause_generation_for_validation:
                        line.hub.resume(Lane.TRAIN)
                        line.headway.paused = False
                        line.headway.changed.notify()
        finally:
            self.running -= 1
            self.done.notify()

    async def _validate(self, trained: int) -> None:
        line, rewards = self._line, []
        line.events.emit("validate.begin", "validate", trained=trained)
        finished: asyncio.Queue[GroupRun | None] = asyncio.Queue()
        count = 0
        async with OrderedTaskGroup() as tasks:
            loop = self._loop(finished, tasks)
            while count < line.settings.eval_tasks and (task := self._tasks.task(count)) is not None:
                loop.start(count, task)
                count += 1
            for _ in range(count):
                run = await finished.get()
                if run is None:
                    continue
                for episode in run.episodes.values():
                    verdict = loop.score(run, episode)
                    await asyncio.wait([verdict])
                    if not verdict.cancelled() and verdict.exception() is None:
                        rewards.append(verdict.result().value)
                loop.close(run.group_id)
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        line.events.emit(
            "validate.end", "validate", trained=trained, reward=mean, samples=len(rewards), failed=count - len(rewards)
        )

    def _loop(self, finished: asyncio.Queue[GroupRun | None], tasks: asyncio.TaskGroup) -> RolloutLoop:
        line = self._line
        return RolloutLoop(
            hub=line.hub,
            environments=line.backends.environments,
            reward=line.backends.reward,
            settings=replace(line.settings, group_size=1, spare_members=0, turn_barrier=False, replicate=True),
            events=line.events,
            book=NoBook(),
            tasks=tasks,
            on_group=finished.put_nowait,
            on_failed=lambda run, reason: finished.put_nowait(None),
            lane=Lane.VALIDATE,
            who="validate",
            prefix="v",
        )
