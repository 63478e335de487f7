"""Small denoising models, engines that serve them, and groups of what they made."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.losses import LossSettings
from headway.algorithms.objective import PolicyObjective
from headway.denoising.denoising_engine import DenoisingEngine
from headway.denoising.denoising_runner import DenoisingRunner
from headway.denoising.denoising_scheduler import DenoisingRequest, DenoisingStepResult
from headway.denoising.denoising_trainer import DenoisingTrainer
from headway.denoising.models.mmdit import MmditConfig, SmallMmdit
from headway.denoising.settings import DenoisingSettings, DenoisingTrainerSettings
from headway.engines.base import Engine, Progress, Request
from headway.engines.native.settings import NativeSettings
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.types import Episode, FinishReason, Sample, SampleGroup, SamplingParams, Score, Task, Turn
from headway.weights.weight_store import WeightStore
from tests.engines.factory import HandOver, run, version_of

__all__ = ["HandOver", "run", "version_of"]

SHAPE = MmditConfig(height=8, width=8, patch=4, characters=4, dim=16, depth=1, heads=2, mlp_ratio=2.0)


def make_model(seed: int = 0, config: MmditConfig = SHAPE) -> SmallMmdit:
    """Random, and with a velocity that is not zero."""
    model = SmallMmdit(config, seed=seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for one in (model.last_modulation, model.velocity):
            nn.init.normal_(one.weight, std=0.3)
    return model


class SlowDenoising(DenoisingRunner):
    """Takes its time for each step, counts them, and breaks when told to."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.steps = 0
        self.step_s = 0.005
        self.broken = False
        self.midway = threading.Event()
        """Set after a dozen steps."""

    def step(self, rows: Sequence[DenoisingRequest]) -> list[DenoisingStepResult]:
        time.sleep(self.step_s)
        if self.broken:
            raise RuntimeError("the model broke")
        self.steps += 1
        if self.steps == 12:
            self.midway.set()
        return super().step(rows)


def make_engine(
    name: str = "engine/0", *, slots: int = 4, runner: Any = DenoisingRunner, **settings: Any
) -> DenoisingEngine:
    return DenoisingEngine(
        name, make_model, DenoisingSettings(**settings), NativeSettings(slots=slots), make_runner=runner
    )


async def serve(engine: Engine, model: SmallMmdit, version: int = 0) -> None:
    """Load and flip."""
    manifest, buckets = version_of(model, version)
    await engine.receiver.begin(manifest)
    for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()


def request(
    name: str = "a", prompt: str = "17", *, group: int = -1, steps: int = 8, temperature: float = 1.0, **params: Any
) -> Request:
    return Request(
        request_id=name,
        session=name,
        prompt=tuple(prompt.encode()),
        params=SamplingParams(max_new_tokens=steps, temperature=temperature, **params),
        prefix_key=group,
    )


async def together(engine: Engine, requests: Sequence[Request]) -> list[Progress]:
    """All at once, to their ends."""
    parts = [Progress() for _ in requests]
    ends = await asyncio.gather(*(engine.generate(each, part) for each, part in zip(requests, parts, strict=True)))
    assert all(end is FinishReason.STOP for end in ends)
    return parts


def latent(data: bytes, config: MmditConfig = SHAPE) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(config.channels, config.height, config.width)


def sample(name: str, prompt: str, progress: Progress, reward: float) -> Sample:
    """What an engine made, judged."""
    made = progress.generation(FinishReason.STOP)
    task = Task(position=0, prompt=tuple(prompt.encode()))
    episode = Episode(sample_id=name, task=task, turns=(Turn(observation=task.prompt, generation=made),))
    versions = [run.version for run in made.runs]
    return Sample(
        sample_id=name,
        episode=episode,
        oldest=min(versions),
        newest=max(versions),
        actions=len(made.actions),
        score=Score(value=reward),
    )


def groups_of(
    model: SmallMmdit, numbers: Sequence[int], *, members: int = 4, steps: int = 6, version: int = 0, **settings: Any
) -> tuple[SampleGroup, ...]:
    """Groups as an engine with `model` makes them, also inside a scenario; brighter pictures have higher rewards."""

    async def make() -> list[SampleGroup]:
        engine = make_engine(slots=16, **settings)
        try:
            await serve(engine, model, version)
            made = []
            for number in numbers:
                asked = [request(f"{number}.{one}", str(number), group=number, steps=steps) for one in range(members)]
                parts = await together(engine, asked)
                made.append(_group(number, parts))
            return made
        finally:
            await engine.close()

    found: list[list[SampleGroup]] = []

    async def scenario() -> None:
        found.append(await make())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run, scenario()).result()
    return tuple(found[0])


def _group(number: int, parts: Sequence[Progress]) -> SampleGroup:
    samples = []
    for index, progress in enumerate(parts):
        image = progress.actions[-1].image
        samples.append(sample(f"{number}.{index}", str(number), progress, sum(image.pixels) / len(image.pixels) / 255))
    return SampleGroup(group_id=number, task=samples[0].episode.task, samples=tuple(samples))


def local(**options: Any) -> LocalSettings:
    options.setdefault(
        "objective", PolicyObjective(pg_variant="ppo", settings=LossSettings(clip_low=1e-3, clip_high=1e-3))
    )
    return LocalSettings(
        advantages=AdvantageSettings(norm_std_type="batch", advantage_clip=5.0),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        **options,
    )


def make_trainer(
    *, denoising: DenoisingSettings | None = None, seed: int = 0, arena: Any = None, **options: Any
) -> DenoisingTrainer:
    """Publishes in float32."""
    settings = options.pop("local", None) or local()
    training = DenoisingTrainerSettings(
        local=settings, denoising=denoising or DenoisingSettings(), micro_batch_samples=3, **options
    )
    return DenoisingTrainer(
        lambda: make_model(seed), training, WeightStore(bucket_mb=0.01, wire_dtype=None, arena=arena)
    )
