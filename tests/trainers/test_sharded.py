"""Ranks learn what one process learns, die together, and leave checkpoints that any number of them can read."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError, TrainerCrashed, TrainerError
from headway.processes.base import ChildSpec, StartPeer
from headway.processes.child_process import ChildProcess
from headway.trainers.base import ScoreKind, Trainer, TrainerScorer
from headway.trainers.sharded.rank_layout import RankLayout
from headway.trainers.sharded.ranked_trainer import MultiRankTrainer, RankProcesses
from headway.types import Batch
from headway.weights.shared_memory import PayloadReader
from headway.weights.shared_version import view_tensors

from ..contracts.trainer_contract import TrainerContract, Watched
from ..processes.template_pool import Pool
from . import factory
from .sharded_targets import whole

more = pytest.mark.sharded


@cache
def pool() -> Pool:
    return Pool("tests.trainers.sharded_targets")


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    pool().close()


class WatchedRanks(Watched, MultiRankTrainer):
    @property
    def pids(self) -> list[int]:
        assert isinstance(self._child, RankProcesses)
        return [peer.pid for peer in self._child._peers]  # type: ignore[attr-defined]


class Ranked:
    """Runs a scenario on the pool's loop and closes what it has made."""

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.made: list[WatchedRanks] = []
        pool().run(self.closed(scenario))

    async def closed(self, scenario: Coroutine[Any, Any, None]) -> None:
        try:
            await scenario
        finally:
            await asyncio.gather(*(trainer.close() for trainer in self.made))

    def ranked(
        self,
        ranks: int = 2,
        *,
        target: str = "rank",
        start: StartPeer | None = None,
        grace_s: float = 10.0,
        join_s: float = 120.0,
        **args: Any,
    ) -> WatchedRanks:
        spec = ChildSpec(name="trainer", target=f"tests.trainers.sharded_targets:{target}", args=args)
        self.made.append(WatchedRanks(spec, start or pool().start, ranks=ranks, grace_s=grace_s, join_s=join_s))
        return self.made[-1]


def kill(trainer: WatchedRanks, rank: int) -> None:
    os.kill(trainer.pids[rank], signal.SIGKILL)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def weights(trainer: Trainer) -> dict[str, Tensor]:
    """What is published, by name."""
    manifest, buckets = await trainer.source.gather(trainer.version)
    reader = PayloadReader()
    data = bytearray().join([bytes(reader.open(bucket.payload)) async for bucket in buckets])
    found = view_tensors(manifest.tensors, torch.frombuffer(data, dtype=torch.uint8), 0)
    return {name: tensor.clone() for name, tensor in found.items()}


def furthest(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


SAME_UP_TO_ROUNDING = ("loss", "pg_loss", "grad_norm", "entropy", "ratio_mean", "ratio_max", "actions", "kl_loss")
SAME = ("tokens", "samples", "skipped_samples", "optimizer_steps", "learning_rate", "reward", "clip_fraction")

CASES: list[Any] = [
    pytest.param(2, {"mini": 4, "checkpointing": True, "tokens": 40}, id="weights-cut-in-2"),
    pytest.param(2, {"tensor": 2, "model": "qwen3", "tokens": 40}, id="layers-cut-in-2"),
    pytest.param(2, {"context": 2, "tokens": 200, "checkpointing": True}, id="sequences-cut-in-2"),
    pytest.param(2, {"model": "mixture", "tokens": 40, "checkpointing": True, "precision": "fp32"}, id="mixture-on-2"),
    pytest.param(2, {"model": "mixture", "context": 2, "precision": "fp32"}, id="mixture-and-sequences", marks=more),
    pytest.param(2, {"lora": True, "reference": True, "precision": "fp32"}, id="adapters-on-2", marks=more),
    pytest.param(3, {"tokens": 30}, id="weights-cut-in-3", marks=more),
    pytest.param(4, {"tensor": 2, "model": "qwen3", "mini": 6}, id="weights-and-layers", marks=more),
    pytest.param(4, {"tensor": 2, "context": 2, "model": "qwen3"}, id="layers-and-sequences", marks=more),
    pytest.param(4, {"context": 2, "reference": True}, id="weights-and-sequences", marks=more),
    pytest.param(2, {"context": 2, "lora": True, "precision": "fp32"}, id="adapters-and-sequences", marks=more),
    pytest.param(2, {"critic": True, "mini": 4}, id="critic-on-2", marks=more),
    pytest.param(4, {"critic": True, "tensor": 2, "context": 2}, id="critic-on-4", marks=more),
]


class TestEquality(Ranked):
    @pytest.mark.parametrize(("ranks", "options"), CASES)
    def test_ranks_learn_what_one_process_learns(self, ranks: int, options: dict[str, Any]) -> None:
        async def scenario() -> None:
            one, many = whole(options), self.ranked(ranks, **options)
            assert furthest(await weights(one), await weights(many)) < 1e-6
            for trained in range(3):
                batch = factory.batch(trained, groups=3, turns=1 + trained % 2)
                batch = factory.add_routing(batch) if options.get("model") == "mixture" else batch
                alone, together = await one.train(batch), await many.train(batch)
                for name in SAME_UP_TO_ROUNDING:
                    assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
                for name in SAME:
                    assert together[name] == alone[name], name
                assert furthest(await weights(one), await weights(many)) < 1e-4
            kinds: list[ScoreKind] = ["policy", *(["reference"] if options.get("reference") else [])]
            for kind in kinds:
                ours = await TrainerScorer(many, kind).score(factory.group(7))
                theirs = await one.score(kind, factory.group(7))
                for left, right in zip(ours, theirs, strict=True):
                    assert list(left) == pytest.approx(right, abs=1e-4)
            await one.close()

        self.run(scenario())

    def test_a_rank_without_samples_does_not_hold_up_the_others(self) -> None:
        async def scenario() -> None:
            one, many = whole({}), self.ranked(3)
            batch = factory.batch(0, groups=1, members=2)
            alone, together = await one.train(batch), await many.train(batch)
            assert together["micro_batches"] == 2 < 3
            assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4)
            assert furthest(await weights(one), await weights(many)) < 1e-4
            await one.close()

        self.run(scenario())


class TestCheckpoints(Ranked):
    def test_what_many_wrote_one_reads_and_what_one_wrote_others_read(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            first = self.ranked(2, model="qwen3")
            await first.train(factory.batch(0))
            await first.save(tmp_path / "a")
            one = whole({"model": "qwen3"})
            await one.load(tmp_path / "a")
            assert one.version == 1 and furthest(await weights(one), await weights(first)) == 0
            for trainer in (first, one):
                await trainer.train(factory.batch(1))
            assert furthest(await weights(one), await weights(first)) < 1e-4, "moments came along"
            await one.save(tmp_path / "b")
            second = self.ranked(2, model="qwen3", tensor=2)
            await second.load(tmp_path / "b")
            assert second.version == 2 and furthest(await weights(one), await weights(second)) == 0
            for trainer in (one, second):
                await trainer.train(factory.batch(2))
            assert furthest(await weights(one), await weights(second)) < 1e-4
            await second.save(tmp_path / "c")
            third = self.ranked(2, model="qwen3", context=2)
            await third.load(tmp_path / "c")
            assert furthest(await weights(second), await weights(third)) == 0
            await one.close()

        self.run(scenario())
        assert {path.name for path in (tmp_path / "c").iterdir()} == {path.name for path in (tmp_path / "b").iterdir()}

    def test_a_checkpoint_of_another_model_changes_nothing(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            other = whole({"model": "qwen3"})
            await other.save(tmp_path / "other")
            trainer = self.ranked(2)
            before = await weights(trainer)
            with pytest.raises(TrainerError, match=r"model\.safetensors|optimizer\.safetensors"):
                await trainer.load(tmp_path / "other")
            assert trainer.version == 0 and furthest(before, await weights(trainer)) == 0
            await trainer.train(factory.batch(0))
            await other.close()

        self.run(scenario())

    @more
    def test_pieces_of_four_ranks_make_whole_tensors(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            four, one = self.ranked(4, model="qwen3", tensor=2), whole({"model": "qwen3"})
            for trainer in (four, one):
                await trainer.train(factory.batch(0))
            await four.save(tmp_path / "a")
            await one.load(tmp_path / "a")
            assert furthest(await weights(one), await weights(four)) == 0
            two = self.ranked(2, model="qwen3")
            await two.load(tmp_path / "a")
            for trainer in (four, two):
                await trainer.train(factory.batch(1))
            assert furthest(await weights(two), await weights(four)) < 1e-4
            await one.close()

        self.run(scenario())

    @more
    def test_half_precision_leaves_the_files_of_the_local_trainer(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            many, one = self.ranked(2, precision="bf16"), whole({"precision": "bf16"})
            await many.train(factory.batch(0))
            await many.save(tmp_path / "many")
            await one.load(tmp_path / "many")
            await one.save(tmp_path / "one")
            await many.load(tmp_path / "one")
            assert many.version == one.version == 1
            await one.close()

        self.run(scenario())


class TestLife(Ranked):
    def test_when_one_rank_dies_all_do_and_they_come_back_together(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            trainer = self.ranked(2)
            await trainer.train(factory.batch(0))
            await trainer.save(tmp_path / "a")
            pids = trainer.pids
            step = asyncio.create_task(MultiRankTrainer.train(trainer, factory.batch(1)))
            await asyncio.sleep(0)
            kill(trainer, 1)
            async with asyncio.timeout(60):
                with pytest.raises(TrainerCrashed, match=r"trainer/1 .*SIGKILL"):
                    await step
            with pytest.raises(TrainerCrashed, match="SIGKILL"):
                await TrainerScorer(trainer, "policy").score(factory.group(1))
            await trainer.restart()
            assert gone(pids)
            await trainer.load(tmp_path / "a")
            assert trainer.version == 1
            await trainer.train(factory.batch(1))
            assert trainer.version == 2

        self.run(scenario())

    def test_a_rank_that_fails_alone_takes_all_of_them_down(self) -> None:
        async def scenario() -> None:
            trainer = self.ranked(2, target="failing", grace_s=0.2)
            with pytest.raises(TrainerCrashed, match="not enough memory"):
                await trainer.train(factory.batch(0))
            with pytest.raises(TrainerCrashed):
                await trainer.train(factory.batch(0))

        self.run(scenario())

    @pytest.mark.parametrize("target", ["refusing", "regretting"])
    def test_a_rank_that_does_not_come_up_says_why_and_leaves_nobody(self, target: str) -> None:
        async def scenario() -> None:
            trainer = self.ranked(2, target=target)
            with pytest.raises(ConfigError, match="rank 1 does not like it"):
                await trainer.start()
            with pytest.raises(TrainerCrashed, match="does not come up"):
                await trainer.train(factory.batch(0))

        self.run(scenario())

    def test_ranks_that_do_not_meet_in_time_are_ended_and_come_back(self) -> None:
        async def scenario() -> None:
            trainer = self.ranked(2, target="missing", join_s=0.3)
            with pytest.raises(TrainerCrashed, match=r"ranks on 127\.0\.0\.1 were not ready after 0\.3 s; they meet"):
                await trainer.train(factory.batch(0))
            pids = trainer.pids
            with pytest.raises(TrainerCrashed, match="not ready"):
                await trainer.restart()
            assert gone(pids)

        self.run(scenario())

    def test_a_trainer_that_is_closed_while_it_comes_up_leaves_nobody(self) -> None:
        async def scenario() -> None:
            started: list[ChildProcess] = []
            closed = asyncio.Event()

            async def start(spec: ChildSpec) -> ChildProcess:
                child = await pool().start(spec)
                started.append(child)
                await closed.wait()
                return child

            trainer = self.ranked(2, start=start)
            coming = asyncio.create_task(trainer.start())
            while len(started) < 2:  # noqa: ASYNC110 - both are there
                await asyncio.sleep(0.001)
            await trainer.close()
            closed.set()
            with pytest.raises(TrainerCrashed, match="trainer is closed"):
                await coming
            while not gone([child.pid for child in started]):  # noqa: ASYNC110 - in the kernel's own time
                await asyncio.sleep(0.01)

        self.run(scenario())

    def test_a_start_that_is_called_off_leaves_nobody_and_can_be_made_again(self) -> None:
        async def scenario() -> None:
            trainer = self.ranked(2)
            start = asyncio.create_task(trainer.start())
            while not trainer.pids:  # noqa: ASYNC110 - they are there, and about to meet
                await asyncio.sleep(0.001)
            pids = trainer.pids
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
            while not gone(pids):  # noqa: ASYNC110 - the kernel ends them in its own time
                await asyncio.sleep(0.01)
            await trainer.train(factory.batch(0))
            assert trainer.version == 1

        self.run(scenario())

    def test_a_cancelled_step_is_completed(self) -> None:
        async def scenario() -> None:
            trainer = self.ranked(2)
            await trainer.start()
            step = asyncio.create_task(MultiRankTrainer.train(trainer, factory.batch(0)))
            await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            await TrainerScorer(trainer, "policy").score(factory.group(1))  # behind the step
            assert trainer.version == 1

        self.run(scenario())


class TestRankedTrainer(Ranked, TrainerContract):
    def make(self) -> Trainer:
        return self.ranked(2)

    def batch(self, trained: int) -> Batch:
        return factory.batch(trained)

    async def crash(self, trainer: Trainer) -> None:
        assert isinstance(trainer, WatchedRanks)
        kill(trainer, 1)

    def contents(self, trainer: Trainer) -> object:
        assert isinstance(trainer, WatchedRanks)
        return trainer.contents


def test_every_rank_has_a_seat_of_its_own() -> None:
    layout = RankLayout(ranks=12, tensor=2, context=3)
    assert (layout.data, layout.shards) == (2, 6) and layout.text == "data 2 × context 3 × tensor 2"
    assert len({layout.coordinates(rank) for rank in range(12)}) == 12
    assert (
        layout.coordinates(1) == (0, 0, 1) and layout.coordinates(2) == (0, 1, 0) and layout.coordinates(6) == (1, 0, 0)
    )
    assert layout.rank_sets("context")[0] == [0, 2, 4] and layout.rank_sets("data")[1] == [1, 7]
    with pytest.raises(ConfigError, match="do not divide"):
        RankLayout(ranks=4, tensor=3)


torch.set_num_threads(1)
