"""The whole flow on a denoising model, at a headway of zero, is the single-file reference step by step.

Trainer (float64), engines (float32), weight updates, rewards and scheduler are those of a real run, all in this
process. What the flow trained is given to the reference's own update, from the same first weights.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.losses import LossSettings
from headway.algorithms.objective import PolicyObjective
from headway.denoising.denoising_engine import DenoisingEngine
from headway.denoising.denoising_trainer import DenoisingTrainer
from headway.denoising.settings import DenoisingSettings, DenoisingTrainerSettings
from headway.engines.native.settings import NativeSettings
from headway.flow.backends import Backends, RunContext
from headway.flow.training_flow import AsyncTrainingFlow
from headway.launch.environment_pool import SingleTurnPool
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.settings import RunSettings
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.types import Batch, Episode, Sample, SamplingParams, Score, Task, VersionRun
from headway.weights.host_transports import InProcessTransport
from headway.weights.weight_store import WeightStore
from tests.denoising.factory import latent, make_model

FILE = Path(__file__).parents[2] / "examples" / "reference_flow_grpo.py"
DENOISING = DenoisingSettings(sampler="cps", noise_level=0.8, shift=3.0, window="random", window_size=2)
NEAR = 2e-5
"""Between two ways to compute the same from latents and log-probabilities in float32."""


@dataclass(frozen=True, kw_only=True)
class Run:
    batches: list[Batch]
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    reference: list[tuple[float, float]]
    """Loss and norm of the gradient, step by step."""
    reference_weights: dict[str, Tensor]


class Numbers:
    """One prompt a position."""

    def task(self, position: int) -> Task | None:
        return Task(position=position, prompt=tuple(str(position % 90 + 10).encode()))


class Bright:
    """The brighter the better."""

    async def score(self, episode: Episode) -> Score:
        image = episode.turns[0].generation.image
        assert image is not None
        return Score(value=sum(image.pixels) / len(image.pixels) / 255)


def trainer_of(options: Any) -> DenoisingTrainer:
    local = LocalSettings(
        objective=PolicyObjective(
            pg_variant="ppo", settings=LossSettings(clip_low=options.clip, clip_high=options.clip)
        ),
        advantages=AdvantageSettings(norm_std_type="batch", advantage_clip=5.0),
        optimizer=OptimizerSettings(learning_rate=options.learning_rate, max_grad_norm=options.max_grad_norm),
        precision="fp64",
    )
    training = DenoisingTrainerSettings(local=local, denoising=DENOISING, micro_batch_samples=5)
    return DenoisingTrainer(make_model, training, WeightStore(bucket_mb=0.1, wire_dtype=torch.float32))


async def play(options: Any, run_dir: Path) -> tuple[list[Batch], list[dict[str, float]], dict[str, Tensor]]:
    """What was trained, what was told about it, and the weights that came of it."""
    trainer = trainer_of(options)
    engines = [DenoisingEngine(f"engine/{n}", make_model, DENOISING, NativeSettings(slots=6)) for n in range(2)]
    batches, told = list[Batch](), list[LoggedEvent]()
    clock = asyncio.get_running_loop().time
    flow = AsyncTrainingFlow(
        trainer=RunContext(
            backends=Backends(
                trainer=trainer,
                engines=engines,
                transport=InProcessTransport(),
                tasks=Numbers(),
                environments=SingleTurnPool(),
                reward=Bright(),
                devices={"train": (0,), "generate": (1,)},
            ),
            settings=RunSettings(
                groups_per_step=options.prompts_per_step,
                group_size=options.group_size,
                max_steps=options.steps,
                async_generation_ratio=0.0,
                max_num_gen_batches=0,
                save_steps=0,
                eval_steps=0,
                seed=0,
                sampling=SamplingParams(max_new_tokens=options.denoising_steps),
            ),
            events=EventLog(clock, told.append),
            run_dir=run_dir,
            clock=clock,
            on_trained=lambda batch, trained: batches.append(batch),
        )
    )
    try:
        summary = await flow.run()
        assert summary.finished and summary.trained == options.steps, summary
        ends = [dict(event.data) for event in told if event.kind == "step.end"]
        return batches, ends, {name: one.clone() for name, one in trainer.learner.policy.weights().items()}
    finally:
        for engine in engines:
            await engine.close()
        await trainer.close()


def drawing_of(reference: ModuleType, sample: Sample) -> Any:
    """A sample as the reference would have made it."""
    (turn,) = sample.episode.turns
    actions, logps = turn.generation.actions, turn.generation.logps
    trained = [place for place, step in enumerate(actions) if step.trained]
    befores = [latent(actions[place].before or actions[place - 1].after) for place in trained]
    assert sample.score is not None
    return reference.Drawing(
        prompt=bytes(turn.observation).decode(),
        picture=turn.generation.image,
        befores=torch.stack(befores).double(),
        afters=torch.stack([latent(actions[place].after) for place in trained]).double(),
        logps=torch.tensor([logps[place] for place in trained], dtype=torch.float64),
        first=trained[0],
        reward=sample.score.value,
    )


def follow(reference: ModuleType, options: Any, batches: list[Batch]) -> tuple[list[tuple[float, float]], Any]:
    """Every step of the flow done again by the reference, which starts where the flow started."""
    model = make_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    found = []
    for batch in batches:
        groups = [[drawing_of(reference, sample) for sample in group.samples] for group in batch.groups]
        found.append(reference.train_step(model, optimizer, groups, options))
    return found, {name: one.detach() for name, one in model.named_parameters()}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    pytest.importorskip("PIL")
    spec = importlib.util.spec_from_file_location("reference_flow_grpo", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["reference_flow_grpo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(reference: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = reference.Options(
        steps=4, prompts_per_step=3, group_size=4, denoising_steps=6, window=2, learning_rate=1e-3, clip=1e-3
    )
    batches, metrics, weights = asyncio.run(play(options, tmp_path_factory.mktemp("run")))
    steps, reference_weights = follow(reference, options, batches)
    return Run(batches=batches, metrics=metrics, weights=weights, reference=steps, reference_weights=reference_weights)


def test_losses_and_gradients_of_every_step_are_those_of_the_reference(run: Run) -> None:
    assert len(run.reference) == 4
    for step, (loss, norm) in zip(run.metrics, run.reference, strict=True):
        assert step["train/loss"] == pytest.approx(loss, abs=NEAR)
        assert step["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert step["train/ratio_max"] == pytest.approx(1.0, abs=NEAR) and step["train/lag_max"] == 0.0
    assert all(norm > 1e-3 for _, norm in run.reference)


def test_weights_after_the_last_step_are_those_of_the_reference(run: Run) -> None:
    start = make_model().state_dict()
    assert run.weights.keys() == run.reference_weights.keys()
    for name, wanted in run.reference_weights.items():
        torch.testing.assert_close(run.weights[name], wanted, rtol=1e-4, atol=2e-5)
    assert max(float((run.weights[name] - start[name]).abs().max()) for name in start) > 1e-3


def test_every_picture_was_made_by_the_version_that_was_trained(run: Run) -> None:
    for number, batch in enumerate(run.batches):
        for group in batch.groups:
            for sample in group.samples:
                assert sample.episode.runs == (VersionRun(version=number, count=6),)
