"""Engines and trainers in processes of their own meet the contracts, and lose nothing when a process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headway.engines.base import Engine, Progress, Request
from headway.engines.remote_engine import RemoteEngine
from headway.errors import ConfigError, EngineCrashed, EngineError, ScoringError, TrainerCrashed, TransferError
from headway.processes.base import ChildSpec, StartPeer
from headway.processes.child_process import ChildProcess
from headway.trainers.base import Scorer, Trainer, TrainerScorer
from headway.trainers.remote_trainer import RemoteTrainer, ReplicaScorer
from headway.types import Batch, FinishReason, SampleGroup
from headway.weights.base import Bucket, WeightReceiver, WeightSource, WeightTransport
from headway.weights.host_transports import SharedMemoryTransport
from headway.weights.weight_store import SharedArena, WeightStore

from ..engines import factory as engines
from ..processes.template_pool import Pool
from ..trainers import factory as trainers
from .engine_contract import EngineContract
from .remote_targets import tiny_trainer
from .trainer_contract import TrainerContract, Watched
from .weights_contract import WeightsContract

LENGTH = EngineContract.LENGTH


def spec(name: str, target: str, **args: Any) -> ChildSpec:
    return ChildSpec(name=name, target=f"tests.contracts.remote_targets:{target}", args={"name": name, **args})


@cache
def pool() -> Pool:
    return Pool()


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    pool().close()


def counting_store(*versions: int) -> WeightStore:
    """Every version is the counting model."""
    store = WeightStore(bucket_mb=40_000 / 2**20, wire_dtype=None, arena=SharedArena())
    for version in versions:
        store.publish(version, dict(_counting().named_parameters()))
    return store


@cache
def _counting() -> Any:
    return engines.counting_model()


async def serve(receiver: WeightReceiver, source: WeightSource, version: int) -> None:
    """As `param_update` would."""
    manifest, buckets = await source.gather(version)
    await receiver.begin(manifest)
    async for bucket in buckets:
        await receiver.load(bucket)
    await receiver.flip()


class Closing:
    """Runs a scenario on the pool's loop and closes what it has made."""

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.made: list[Callable[[], Awaitable[None]]] = []
        pool().run(self.closed(scenario))

    async def closed(self, scenario: Coroutine[Any, Any, None]) -> None:
        try:
            await scenario
        finally:
            for close in self.made:
                await close()

    def engine(
        self, name: str = "engine/0", target: str = "counting_engine", start: StartPeer | None = None
    ) -> RemoteEngine:
        engine = RemoteEngine(spec(name, target, step_s=0.015, eos=[LENGTH + 3]), 4, start or pool().start)
        self.made.append(engine.close)
        return engine

    def trainer(self) -> Watched:
        trainer = Watched(spec("trainer", "tiny_trainer"), pool().start)
        self.made.append(trainer.close)
        return trainer


def kill(part: RemoteEngine | RemoteTrainer | ReplicaScorer, number: signal.Signals = signal.SIGKILL) -> None:
    peer = part._child._peers[0]
    assert peer is not None
    os.kill(peer.pid, number)  # type: ignore[attr-defined]


async def some_actions(engine: RemoteEngine) -> None:
    """A request has made some of its actions."""
    while not any(len(progress.actions) >= 4 for progress in engine._streams.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.002)


class TestRemoteEngine(Closing, EngineContract):
    def make(self, name: str = "engine/0") -> Engine:
        return self.engine(name)

    async def serve(self, engine: Engine, version: int) -> None:
        store = counting_store(version)
        await serve(engine.receiver, store, version)
        store.close()

    def request(self, name: str = "a") -> Request:
        return engines.request(name, [1, 2, 3], count=100)

    async def midway(self, engine: Engine, progress: Progress) -> None:
        assert isinstance(engine, RemoteEngine)
        await some_actions(engine)

    async def crash(self, engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        kill(engine)

    def test_nothing_received_is_lost_when_the_process_is_killed(self) -> None:
        async def scenario() -> None:
            engine = await self.started(version=7)
            assert isinstance(engine, RemoteEngine)
            parts = [Progress() for _ in range(3)]
            calls = [
                asyncio.create_task(engine.generate(self.request(str(number)), progress))
                for number, progress in enumerate(parts)
            ]
            await self.midway(engine, parts[0])
            before = [len(progress.actions) for progress in parts]
            await self.crash(engine)
            for call in calls:
                with pytest.raises(EngineCrashed, match="SIGKILL"):
                    await call
            for progress, had in zip(parts, before, strict=True):
                self.consistent(progress)
                assert list(progress.actions) == list(range(4, 4 + len(progress.actions)))
                assert len(progress.actions) >= had and {run.version for run in progress.runs} <= {7}
            assert engine.receiver.version == -1
            with pytest.raises(EngineCrashed):
                await engine.pause()
            with pytest.raises(EngineCrashed):
                await engine.receiver.flip()
            await engine.abort("0")
            await engine.resume()

        self.run(scenario())

    def test_an_idle_engine_that_is_killed_serves_nothing_at_once(self) -> None:
        async def scenario() -> None:
            engine = await self.started(version=7)
            assert isinstance(engine, RemoteEngine) and engine.receiver.version == 7
            kill(engine)
            while engine.receiver.version != -1:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            with pytest.raises(EngineCrashed, match="SIGKILL"):
                await engine.generate(self.request(), Progress())

        self.run(scenario())

    def test_a_listener_that_fails_costs_nobody_an_action(self) -> None:
        async def scenario() -> None:
            problems: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))
            engine = await self.started()
            parts = [Progress(on_chunk=lambda actions: 1 // 0), Progress()]  # type: ignore[arg-type, return-value]
            async with asyncio.TaskGroup() as tasks:
                for number, progress in enumerate(parts):
                    tasks.create_task(engine.generate(self.request(str(number)), progress))
            asyncio.get_running_loop().set_exception_handler(None)
            for progress in parts:
                self.whole(progress)
            assert problems and all(isinstance(one, ZeroDivisionError) for one in problems)

        self.run(scenario())

    def test_buckets_that_are_not_shared_are_refused(self) -> None:
        async def scenario() -> None:
            engine = self.make()
            manifest, buckets = engines.version_of(_counting(), 1)
            await engine.receiver.begin(manifest)
            with pytest.raises(TransferError, match="cannot be seen"):
                await engine.receiver.load(buckets[0])

        self.run(scenario())

    def test_errors_of_a_request_stay_its_own(self) -> None:
        async def scenario() -> None:
            engine = await self.started()
            with pytest.raises(EngineError, match="the prompt is empty"):
                await engine.generate(replace(self.request(), prompt=()), Progress())
            assert await engine.generate(self.request(), Progress()) is FinishReason.STOP

        self.run(scenario())

    def test_an_engine_that_does_not_come_up_says_why(self) -> None:
        async def scenario() -> None:
            engine = RemoteEngine(spec("engine/9", "no_such_function"), 4, pool().start)
            with pytest.raises(ConfigError, match="no_such_function"):
                await engine.start()
            with pytest.raises(EngineCrashed, match=r"does not come up.*no_such_function"):
                await engine.generate(self.request(), Progress())
            await engine.close()

        self.run(scenario())


class TestRemoteReceiver(Closing, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        engine, store = self.engine(), counting_store(1, 2)

        async def close() -> None:
            store.close()

        self.made.append(close)
        return store, SharedMemoryTransport(), engine.receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=replace(bucket.payload, start=bucket.payload.start + 4))


class TestRemoteTrainer(Closing, TrainerContract):
    def make(self) -> Trainer:
        return self.trainer()

    def batch(self, trained: int) -> Batch:
        return trainers.batch(trained)

    async def crash(self, trainer: Trainer) -> None:
        assert isinstance(trainer, RemoteTrainer)
        kill(trainer)

    def contents(self, trainer: Trainer) -> object:
        assert isinstance(trainer, Watched)
        return trainer.contents or first_contents()

    def test_whoever_waits_for_a_killed_process_is_told(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            trainer = self.trainer()
            await trainer.start()
            kill(trainer, signal.SIGSTOP)  # nothing is answered before the kill
            calls: list[tuple[Awaitable[Any], type[Exception]]] = [
                (RemoteTrainer.train(trainer, self.batch(0)), TrainerCrashed),
                (trainer.save(tmp_path / "x"), TrainerCrashed),
                (trainer.load(tmp_path / "x"), TrainerCrashed),
                (trainer.source.gather(0), TransferError),
                (TrainerScorer(trainer, "policy").score(trainers.group(1)), TrainerCrashed),
            ]
            tasks = [asyncio.ensure_future(call) for call, _ in calls]
            await asyncio.sleep(0)
            kill(trainer)
            for task, (_, error) in zip(tasks, calls, strict=True):
                with pytest.raises(error, match="SIGKILL"):
                    await task
            with pytest.raises(TrainerCrashed):
                await TrainerScorer(trainer, "policy").score(trainers.group(1))

        self.run(scenario())

    def test_a_cancelled_step_is_undone_or_done(self) -> None:
        async def scenario() -> None:
            trainer = self.trainer()
            await trainer.start()
            task = asyncio.create_task(RemoteTrainer.train(trainer, self.batch(0)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await TrainerScorer(trainer, "policy").score(trainers.group(1))  # behind the step
            assert trainer.version in (0, 1)
            await trainer.train(self.batch(trainer.version))
            assert trainer.version in (1, 2)

        self.run(scenario())


class TestTogether(Closing):
    def test_what_is_trained_is_served_and_scored_alike_in_four_processes(self) -> None:
        async def scenario() -> None:
            trainer, engine = self.trainer(), self.engine(target="tiny_engine", start=ChildProcess.start)
            follower = ReplicaScorer(spec("logp", "replica"), pool().start, follows=trainer)
            frozen = ReplicaScorer(spec("ref_logp", "replica"), pool().start)
            self.made += [follower.close, frozen.close]
            group = trainers.group(1)
            assert await close_to(frozen, TrainerScorer(trainer, "reference"), group)
            assert await close_to(frozen, TrainerScorer(trainer, "policy"), group), "before the first step"
            for trained in range(2):
                await trainer.train(trainers.batch(trained))
                await serve(engine.receiver, trainer.source, trainer.version)
                progress = Progress()
                request = engines.request("a", group.samples[0].episode.turns[0].observation, count=8)
                assert await engine.generate(request, progress) is FinishReason.LENGTH
                assert [run.version for run in progress.runs] == [trainer.version]
                made = answered(group, progress)
                scored = await TrainerScorer(trainer, "policy").score(made)
                assert list(scored[0]) == pytest.approx(list(progress.logps), abs=1e-4)
                assert await close_to(follower, TrainerScorer(trainer, "policy"), made)
                assert follower.version == trainer.version == (await follower.score(made)).version  # type: ignore[attr-defined]
                assert scored.version == trainer.version  # type: ignore[attr-defined]
            assert await close_to(frozen, TrainerScorer(trainer, "reference"), group)
            assert not await close_to(frozen, follower, group), "it has learnt something"
            kill(follower)
            with pytest.raises(ScoringError, match="SIGKILL"):
                await follower.score(group)
            kill(frozen)

        self.run(scenario())


def answered(group: SampleGroup, progress: Progress) -> SampleGroup:
    """`group` with one member, whose answer is in `progress`."""
    first = group.samples[0]
    turn = replace(first.episode.turns[0], generation=progress.generation(FinishReason.LENGTH))
    episode = replace(first.episode, turns=(turn,))
    return replace(group, samples=(replace(first, episode=episode, actions=len(progress.actions)),))


async def close_to(left: Scorer, right: Scorer, group: SampleGroup) -> bool:
    ours, theirs = await left.score(group), await right.score(group)
    assert [len(row) for row in ours] == [len(row) for row in theirs] == [one.actions for one in group.samples]
    return all(list(a) == pytest.approx(list(b), abs=1e-5) for a, b in zip(ours, theirs, strict=True))


@cache
def first_contents() -> tuple[str, ...]:
    """Checksums of what every trainer begins with."""

    async def gathered() -> tuple[str, ...]:
        manifest, _ = await tiny_trainer({}).source.gather(0)
        return manifest.checksums

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(asyncio.run, gathered()).result()
