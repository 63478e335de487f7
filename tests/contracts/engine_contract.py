"""What every engine must do, whatever it is made of."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import pytest

from headway.engines.base import Engine, Progress, Request
from headway.errors import EngineCrashed, EngineError
from headway.types import FinishReason, VersionRun


class EngineContract(ABC):
    """Subclass, fill in the factory, and name the class `Test…`."""

    LENGTH = 40
    """Actions of a request made by `request`."""

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run a scenario to its end."""

    @abstractmethod
    def make(self, name: str = "engine/0") -> Engine:
        """A replica without weights. Called inside a scenario."""

    @abstractmethod
    async def serve(self, engine: Engine, version: int) -> None:
        """Load and flip `version`, as `param_update` would."""

    @abstractmethod
    def request(self, name: str = "a") -> Request:
        """Something that makes exactly `LENGTH` actions."""

    @abstractmethod
    async def midway(self, engine: Engine, progress: Progress) -> None:
        """Return when a request started just before is surely running and surely not done."""

    @abstractmethod
    async def crash(self, engine: Engine) -> None:
        """Break the replica."""

    async def started(self, version: int = 0, name: str = "engine/0") -> Engine:
        engine = self.make(name)
        await self.serve(engine, version)
        return engine

    def whole(self, progress: Progress) -> None:
        """What is in `progress` is consistent and complete."""
        self.consistent(progress)
        assert len(progress.actions) == self.LENGTH

    def consistent(self, progress: Progress) -> None:
        assert len(progress.actions) == len(progress.logps) == sum(run.count for run in progress.runs)
        versions = [run.version for run in progress.runs]
        assert versions == sorted(set(versions)), "stretches of one version are merged"

    def test_a_request_ends_with_all_its_actions_stamped(self) -> None:
        async def scenario() -> None:
            engine = await self.started(version=3)
            progress = Progress()
            assert await engine.generate(self.request(), progress) is FinishReason.STOP
            self.whole(progress)
            assert progress.runs == (VersionRun(version=3, count=self.LENGTH),)

        self.run(scenario())

    def test_an_engine_without_weights_refuses_requests(self) -> None:
        async def scenario() -> None:
            engine = self.make()
            assert engine.receiver.version == -1
            with pytest.raises(EngineError):
                await engine.generate(self.request(), Progress())

        self.run(scenario())

    def test_many_requests_are_served_together(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            parts = [Progress() for _ in range(7)]
            async with asyncio.TaskGroup() as tasks:
                for index, progress in enumerate(parts):
                    tasks.create_task(engine.generate(self.request(str(index)), progress))
            for progress in parts:
                self.whole(progress)

        self.run(scenario())

    def test_actions_before_and_after_a_flip_carry_their_own_versions(self) -> None:
        async def scenario() -> None:
            engine = await self.started(version=0)
            progress = Progress()
            task = asyncio.create_task(engine.generate(self.request(), progress))
            await self.midway(engine, progress)
            await self.serve(engine, 1)
            assert engine.receiver.version == 1
            assert await task is FinishReason.STOP
            self.whole(progress)
            assert [run.version for run in progress.runs] == [0, 1], progress.runs

        self.run(scenario())

    def test_abort_keeps_what_was_made(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            progress = Progress()
            task = asyncio.create_task(engine.generate(self.request(), progress))
            await self.midway(engine, progress)
            await engine.abort("a")
            assert await task is FinishReason.ABORTED
            self.consistent(progress)
            assert 0 < len(progress.actions) < self.LENGTH

        self.run(scenario())

    def test_aborting_an_unknown_request_is_ignored(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            await engine.abort("nobody")
            progress = Progress()
            assert await engine.generate(self.request(), progress) is FinishReason.STOP
            await engine.abort("a")
            self.whole(progress)

        self.run(scenario())

    def test_cancelling_the_awaiting_task_aborts_the_request(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            progress = Progress()
            task = asyncio.create_task(engine.generate(self.request(), progress))
            await self.midway(engine, progress)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            self.consistent(progress)
            kept = len(progress.actions)
            assert kept < self.LENGTH
            again = Progress()
            assert await engine.generate(self.request(), again) is FinishReason.STOP
            self.whole(again)
            assert len(progress.actions) == kept, "nothing is written after the end"

        self.run(scenario())

    def test_an_aborted_request_goes_on_exactly_on_another_replica(self) -> None:
        async def scenario() -> None:
            first, second = await self.started(4), await self.started(5, name="engine/1")
            progress = Progress()
            task = asyncio.create_task(first.generate(self.request(), progress))
            await self.midway(first, progress)
            await first.abort("a")
            await task
            kept = len(progress.actions)
            assert await second.generate(self.request(), progress) is FinishReason.STOP
            self.whole(progress)
            assert progress.runs == (
                VersionRun(version=4, count=kept),
                VersionRun(version=5, count=self.LENGTH - kept),
            )

        self.run(scenario())

    def test_pause_stops_at_a_boundary_and_resume_loses_nothing(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            progress = Progress()
            task = asyncio.create_task(engine.generate(self.request(), progress))
            await self.midway(engine, progress)
            await engine.pause()
            kept = len(progress.actions)
            assert 0 < kept < self.LENGTH
            await asyncio.sleep(0.5)
            assert len(progress.actions) == kept and not task.done()
            await engine.resume()
            assert await task is FinishReason.STOP
            self.whole(progress)

        self.run(scenario())

    def test_a_request_sent_to_a_paused_engine_waits(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            await engine.pause()
            task = asyncio.create_task(engine.generate(self.request(), Progress()))
            await asyncio.sleep(0.2)
            assert not task.done()
            await engine.resume()
            assert await task is FinishReason.STOP

        self.run(scenario())

    def test_an_engine_flips_while_paused_and_stays_paused(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            progress = Progress()
            task = asyncio.create_task(engine.generate(self.request(), progress))
            await self.midway(engine, progress)
            await engine.pause()
            await self.serve(engine, 1)
            assert not task.done()
            await engine.resume()
            await task
            self.whole(progress)
            assert [run.version for run in progress.runs] == [0, 1]

        self.run(scenario())

    def test_a_crash_keeps_progress_and_restart_is_empty(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            progress = Progress()
            task = asyncio.create_task(engine.generate(self.request(), progress))
            await self.midway(engine, progress)
            await self.crash(engine)
            with pytest.raises(EngineCrashed):
                await task
            self.consistent(progress)
            with pytest.raises(EngineCrashed):
                await engine.generate(self.request("b"), Progress())
            await engine.restart()
            assert engine.receiver.version == -1
            await self.serve(engine, 1)
            assert await engine.generate(self.request(), progress) is FinishReason.STOP
            self.whole(progress)

        self.run(scenario())

    def test_restart_ends_the_requests_still_out(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            task = asyncio.create_task(engine.generate(self.request(), Progress()))
            await self.midway(engine, Progress())
            restart = asyncio.create_task(engine.restart())
            with pytest.raises(EngineCrashed):
                await task
            await restart
            assert engine.receiver.version == -1

        self.run(scenario())

    def test_close_can_be_called_twice(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            await engine.close()
            await engine.close()

        self.run(scenario())
