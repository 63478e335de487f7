"""The child's side without a child: what is told, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.engines.base import Progress, Request
from headway.engines.remote_engine import EngineHost
from headway.errors import ScoringError, TrainerError, TransferError
from headway.trainers.remote_trainer import ScorerHost, TrainerHost
from headway.types import Batch, FinishReason, SampleGroup, SamplingParams, Task, VersionRun
from headway.weights.base import Bucket, Manifest, SharedSlice, WeightReceiver


class OneBucket:
    """A source whose versions are one bucket each; counts who gathers at the same time."""

    def __init__(self, payload: Any) -> None:
        self.payload = payload
        self.now = self.most = 0

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        return Manifest(version=version, tensors=(), checksums=("x",), total_bytes=0), self._each(version)

    async def _each(self, version: int) -> AsyncIterator[Bucket]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        yield Bucket(version=version, index=0, checksum="x", payload=self.payload)
        self.now -= 1


class Counter:
    """A trainer that counts."""

    def __init__(self, payload: Any = None) -> None:
        self.version = 0
        self.source = OneBucket(payload)

    async def train(self, batch: Batch) -> Mapping[str, float]:
        if batch.trained != self.version:
            raise TrainerError("another version")
        self.version += 1
        return {"loss": 1.0}

    async def save(self, directory: Path) -> None: ...

    async def load(self, directory: Path) -> Sequence[str]:
        self.version = 9
        return ["it is old"]

    async def start(self) -> None: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


class Plain:
    """A scorer whose weights cannot be replaced."""

    receiver = None

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        return []

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def test_a_new_version_is_told_once_and_before_the_answer() -> None:
    async def scenario() -> None:
        told: list[Any] = []
        host = TrainerHost(Counter(), told.append)
        await host.ready()
        assert told == [0]
        await host.train(Batch(trained=0, groups=()))
        assert told == [0, 1]
        with pytest.raises(TrainerError):
            await host.train(Batch(trained=0, groups=()))
        await host.save(Path("x"))
        assert told == [0, 1]
        await host.load(Path("x"))
        assert told == [0, 1, 9]

    asyncio.run(scenario())


def test_weights_on_the_heap_and_scores_of_who_has_none_are_refused() -> None:
    async def scenario() -> None:
        host = TrainerHost(Counter(payload=b"heap"), lambda note: None)
        with pytest.raises(TransferError, match="no other process sees it"):
            await host.gather(0)
        group = SampleGroup(group_id=1, task=Task(position=0), samples=())
        with pytest.raises(ScoringError, match="cannot score"):
            await host.score("policy", group)
        scorer = ScorerHost(Plain(), lambda note: None)
        assert await scorer.score(group) == []
        with pytest.raises(TransferError, match="cannot be replaced"):
            await scorer.flip()
        await scorer.close()

    asyncio.run(scenario())


def test_one_task_gathers_at_a_time() -> None:
    async def scenario() -> None:
        trainer = Counter(payload=SharedSlice(segment="s", start=0, size=0))
        host = TrainerHost(trainer, lambda note: None)
        found = await asyncio.gather(*(host.gather(version) for version in range(5)))
        assert [buckets[0].version for _, buckets in found] == list(range(5))
        assert trainer.source.most == 1

    asyncio.run(scenario())


class Chorus:
    """An engine whose requests make an action each, all together, in every turn of the loop."""

    name, slots = "engine/0", 3
    receiver: WeightReceiver

    def __init__(self) -> None:
        self.parts: list[tuple[Progress, asyncio.Future[FinishReason]]] = []

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        self.parts.append((progress, asyncio.get_running_loop().create_future()))
        if len(self.parts) < self.slots:
            return await self.parts[-1][1]
        for turn in range(4):
            for each, _ in self.parts:
                each.extend([len(each.actions)], [-0.5], version=turn // 2)
            await asyncio.sleep(0)
        for _, end in self.parts:
            end.set_result(FinishReason.LENGTH)
        return FinishReason.LENGTH

    async def abort(self, request_id: str) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def start(self) -> None: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


def test_all_requests_share_one_note_in_a_turn_of_the_loop() -> None:
    async def scenario() -> None:
        told: list[Any] = []
        host = EngineHost(Chorus(), told.append)
        request = Request(request_id="a", session="a", prompt=(1,), params=SamplingParams())
        held = ((0, 1), (-1.0, -1.0), (VersionRun(version=0, count=2),), 0)
        await asyncio.gather(*(host.generate(number, request, held) for number in range(3)))
        assert [counts for counts, *_ in told] == [
            [0, turn // 2, 1, 1, turn // 2, 1, 2, turn // 2, 1] for turn in range(4)
        ]
        assert [actions for _, actions, *_ in told] == [[turn + 2] * 3 for turn in range(4)]

    asyncio.run(scenario())
