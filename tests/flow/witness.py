"""A witness that sees what is really made and trained, and keeps books of its own.

It knows nothing of how the scheduler decides. Weights are nodes of a tree, named by their checksums: a step makes a
child, a lost trainer goes on from an ancestor. The distance of an action from the weights being trained is the way
between the two nodes, whatever version number is stamped on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from pathlib import Path
from typing import Any

import pytest

from headway.engines.base import Engine, Progress, Request
from headway.flow.training_flow import AsyncTrainingFlow
from headway.ledger import Ledger
from headway.monitor.event_log import LoggedEvent
from headway.rewards.base import group_relative_advantages
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.settings import RunSettings
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.simulated_trainer import SimulatedTrainer
from headway.sim.simulated_weights import make_simulated_manifest
from headway.types import Batch, FinishReason, Sample, SampleGroup
from headway.weights.base import Bucket


@dataclass
class Stretch:
    """Actions of one request that one set of weights has made."""

    first: int
    count: int
    weights: str


@dataclass
class Witness:
    """Over all lives of one run."""

    settings: RunSettings
    lineage: dict[int, list[str]] = field(default_factory=dict)
    """Version made → ids of the samples it was made of, in the surviving lineage."""
    events: list[LoggedEvent] = field(default_factory=list)
    flow: AsyncTrainingFlow | None = None
    parents: dict[str, str] = field(default_factory=dict)
    """Weights → the weights they were made from."""
    serving: dict[str, str] = field(default_factory=dict)
    """Engine → the weights in it."""
    made: dict[str, list[Stretch]] = field(default_factory=dict)
    """Request → who made what of it."""
    slots_taken: dict[int, int | None] = field(default_factory=dict)
    """Group → the version it helped to make, `None` before."""

    validated: list[int] = field(default_factory=list)
    """Versions that have a score."""

    # -- attaching

    def attach(self, flow: AsyncTrainingFlow) -> None:
        self.flow = flow
        self.slots_taken.clear()
        trainer = flow.backends.trainer
        assert isinstance(trainer, SimulatedTrainer)
        train: Callable[[Batch], Any] = trainer.train
        colocated = flow.backends.devices["train"] == flow.backends.devices["generate"]
        reserve = flow.backends.reserve
        assert reserve is not None
        make = reserve.make
        flow.backends = replace(flow.backends, reserve=replace(reserve, make=lambda name: self.watched(make(name))))

        async def witnessed(batch: Batch) -> Mapping[str, float]:
            if colocated:
                self.check_engines_stand_still()
            self.check_lent_engines_are_empty()
            before = weights_of(trainer)
            self.look(batch, before)
            metrics: Mapping[str, float] = await train(batch)
            self.parents[weights_of(trainer)] = before
            self.record(batch)
            return metrics

        trainer.train = witnessed  # type: ignore[method-assign]
        if not self.settings.mixed_version_validation:
            flow.context = replace(flow.context, on_validated=self.check_validation)
        for engine in (*flow.backends.engines, *flow.backends.lent):
            self.watched(engine)

    def watched(self, engine: Engine) -> Engine:
        assert isinstance(engine, SimulatedEngine)
        self.watch_weights(engine)
        self.watch_actions(engine)
        return engine

    def watch_weights(self, engine: SimulatedEngine) -> None:
        receiver, loaded = engine._receiver, {}
        load, flip = receiver.load, receiver.flip

        async def watched_load(bucket: Bucket) -> None:
            await load(bucket)
            loaded[bucket.version, bucket.index] = bucket.payload

        async def watched_flip() -> None:
            manifest = receiver._manifest
            await flip()
            assert manifest is not None
            there = [loaded.get((manifest.version, index)) for index in range(len(manifest.checksums))]
            assert there == list(manifest.checksums), f"{engine.name} serves torn weights"
            self.serving[engine.name] = manifest.checksums[0]

        receiver.load, receiver.flip = watched_load, watched_flip  # type: ignore[method-assign]

    def watch_actions(self, engine: SimulatedEngine) -> None:
        generate = engine.generate

        async def watched(request: Request, progress: Progress) -> FinishReason:
            def chunk(actions: Sequence[Any]) -> None:
                first = len(progress.actions) - len(actions)
                known = [stretch for stretch in self.made.get(request.request_id, []) if stretch.first < first]
                for stretch in known:
                    stretch.count = min(stretch.count, first - stretch.first)
                known.append(Stretch(first, len(actions), self.serving[engine.name]))
                self.made[request.request_id] = known

            progress.on_chunk = chunk
            return await generate(request, progress)

        engine.generate = watched  # type: ignore[method-assign]

    def check_engines_stand_still(self) -> None:
        assert self.flow is not None and self.flow.pipeline is not None
        for replica in self.flow.pipeline.hub.replicas:
            engine = replica.engine
            assert isinstance(engine, SimulatedEngine)
            dead = replica.health != "up" or replica.version < 0  # perhaps nobody has noticed yet
            assert dead or engine._holds, f"{engine.name} decodes while its devices train"

    def check_lent_engines_are_empty(self) -> None:
        assert self.flow is not None and self.flow.pipeline is not None
        for replica in self.flow.pipeline.hub.replicas:
            engine = replica.engine
            assert isinstance(engine, SimulatedEngine)
            if replica.lent and replica.health == "up":
                assert not engine._batch.sequences, f"{engine.name} decodes while its devices train"

    # -- hearing and seeing

    def hear(self, event: LoggedEvent) -> None:
        """Events, for what is counted by them."""
        group = event.data.get("group")
        self.free_slots()
        if event.kind == "sample.reopen":
            self.undo(event.data["sample"])
        elif event.kind == "group.start":
            self.slots_taken[group] = None  # type: ignore[index]
            self.check_slots()
        elif event.kind == "group.drop":
            self.slots_taken.pop(group, None)  # type: ignore[arg-type]
        elif event.kind == "group.train" and group in self.slots_taken:
            self.slots_taken[group] = event.data["trained"] + 1
        elif event.kind == "restart" and event.who == "trainer":
            self.slots_taken.clear()

    def check_slots(self) -> None:
        """A group starts only into a free slot: trained and not yet served is not free."""
        assert self.flow is not None and self.flow.pipeline is not None
        settings, taken = self.settings, len(self.slots_taken)
        slots = floor((1 + settings.depth) * settings.groups_per_step + 1e-9) + settings.additional_groups
        assert taken <= slots, f"{taken} groups in {slots} slots"

    def free_slots(self) -> None:
        """What was trained and is served frees its slot for good, also if the engine dies later."""
        pipeline = self.flow.pipeline if self.flow is not None else None
        served = -1 if pipeline is None else max(pipeline.hub.served, pipeline.headway.served)
        for group in [group for group, made in self.slots_taken.items() if made is not None and made <= served]:
            del self.slots_taken[group]

    def rewind(self, run_dir: Path) -> None:
        """A new life begins at the last checkpoint: what was trained after it is undone."""
        if not (run_dir / "ledger.sqlite").exists():
            self.lineage.clear()
            return
        ledger = Ledger(run_dir / "ledger.sqlite")
        last = ledger.last_checkpoint()
        ledger.close()
        reached = last[0] if last else 0
        self.lineage = {version: ids for version, ids in self.lineage.items() if version <= reached}

    def undo(self, sample_id: str) -> None:
        """The trainer was lost: a sample that only it knew of is open again."""
        for ids in self.lineage.values():
            if sample_id in ids:
                ids.remove(sample_id)

    def look(self, batch: Batch, weights: str) -> None:
        """The promises about what is about to be trained."""
        ids = [sample.sample_id for group in batch.groups for sample in group.samples]
        before = {sample for version, samples in self.lineage.items() if version <= batch.trained for sample in samples}
        assert len(set(ids)) == len(ids), f"twice in one batch: {ids}"
        assert not before & set(ids), f"trained twice: {before & set(ids)}"
        assert len(batch.groups) == self.settings.groups_per_step
        for group in batch.groups:
            assert len(group.samples) == self.settings.group_size, f"group {group.group_id} is not whole"
            self.check_advantages(group)
            for sample in group.samples:
                self.check_age(sample, batch.trained, weights)

    def record(self, batch: Batch) -> None:
        for version in [version for version in self.lineage if version > batch.trained]:
            del self.lineage[version]
        self.lineage[batch.trained + 1] = [s.sample_id for group in batch.groups for s in group.samples]

    def check_advantages(self, group: SampleGroup) -> None:
        rewards = [sample.score.value for sample in group.samples if sample.score is not None]
        assert [sample.advantage for sample in group.samples] == pytest.approx(group_relative_advantages(rewards))

    def check_age(self, sample: Sample, trained: int, weights: str) -> None:
        """By its stamps, and by the way between the weights that made it and those being trained."""
        alpha = ceil(self.settings.async_generation_ratio)
        stamps = [run.version for turn in sample.episode.turns for run in turn.generation.runs]
        assert trained - min(stamps) <= alpha and max(stamps) <= trained, f"{sample.sample_id}: {stamps} at {trained}"
        for number, turn in enumerate(sample.episode.turns):
            length = len(turn.generation.actions)  # more was made, and lost, where a life ended before it was kept
            stretches = [stretch for stretch in self.made[f"{sample.sample_id}/{number}"] if stretch.first < length]
            assert sum(min(part.count, length - part.first) for part in stretches) == length, sample.sample_id
            for stretch in stretches:
                way = self.distance(stretch.weights, weights)
                assert way <= alpha, f"{sample.sample_id}: {way} updates away at {trained}, stamped {stamps}"

    def check_validation(self, version: int, samples: Sequence[EvaluatedSample]) -> None:
        """A score is of one version, by the stamps of its answers and by the weights that really made them."""
        self.validated.append(version)
        makers = set()
        for sample in samples:
            for episode, _ in sample.answers:
                stamps = {run.version for run in episode.runs}
                assert stamps == {version}, f"{episode.sample_id}: {stamps} in the score of {version}"
                for number in range(len(episode.turns)):
                    makers |= {stretch.weights for stretch in self.made[f"{episode.sample_id}/{number}"]}
        assert len(makers) <= 1, f"the score of {version} is of {len(makers)} sets of weights"

    def distance(self, left: str, right: str) -> int:
        """Updates between two nodes of the tree of weights."""
        ways = []
        for node in (left, right):
            way = [node]
            while way[-1] in self.parents:
                way.append(self.parents[way[-1]])
            ways.append(way)
        for steps, node in enumerate(ways[0]):
            if node in ways[1]:
                return steps + ways[1].index(node)
        raise AssertionError("weights of different runs")


def weights_of(trainer: SimulatedTrainer) -> str:
    """The name of the weights that a trainer holds now."""
    buckets = trainer._source._cost.buckets
    return make_simulated_manifest(trainer.version, trainer.lineage, buckets).checksums[0]
