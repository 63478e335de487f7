"""Stable Diffusion 3 in the engine and the trainer that small models have: made, trained, served again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.denoising.denoising_engine import DenoisingEngine
from headway.denoising.denoising_trainer import DenoisingTrainer
from headway.denoising.models.denoiser_storage import open_denoiser
from headway.denoising.models.stable_diffusion_3 import StableDiffusion3
from headway.denoising.settings import DenoisingSettings, DenoisingTrainerSettings
from headway.engines.native.settings import NativeSettings
from headway.trainers.local.settings import LoraSettings
from headway.types import Batch, SampleGroup
from headway.weights.weight_store import WeightStore
from tests.denoising.factory import _group, local, request, run, serve, together
from tests.denoising_models.factory import tiny_pipeline

pytest.importorskip("diffusers")
pytest.importorskip("peft")
STEPS, DENOISING = 6, DenoisingSettings(guidance=1.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sd3")
    tiny_pipeline().save_pretrained(directory)
    return directory


async def made(engine: DenoisingEngine, number: int) -> SampleGroup:
    asked = [request(f"{number}.{one}", str(number), group=number, steps=STEPS) for one in range(4)]
    return _group(number, await together(engine, asked))


def trainer_of(make: Any, lora: LoraSettings | None) -> DenoisingTrainer:
    training = DenoisingTrainerSettings(local=local(lora=lora), denoising=DENOISING, micro_batch_samples=3)
    return DenoisingTrainer(make, training, WeightStore(bucket_mb=0.05, wire_dtype=None))


@pytest.mark.parametrize(
    ("lora", "rounds"), [(None, 1), (LoraSettings(rank=2, targets=("to_q", "to_k", "to_v", "add_q_proj")), 2)]
)
def test_it_is_sampled_trained_and_served_again(
    base: Path, tmp_path: Path, lora: LoraSettings | None, rounds: int
) -> None:
    make = partial(open_denoiser, base, height=16, width=16)
    metrics: list[dict[str, float]] = []

    async def scenario() -> None:
        engine, trainer = DenoisingEngine("engine/0", make, DENOISING, NativeSettings(slots=8)), trainer_of(make, lora)
        await serve(engine, make())
        for number in range(rounds):
            groups = (await made(engine, 2 * number + 1), await made(engine, 2 * number + 2))
            metrics.append(dict(await trainer.train(Batch(trained=number, groups=groups))))
            served = make()
            served.load_state_dict(trainer.learner.policy.weights())  # type: ignore[attr-defined]
            await serve(engine, served, number + 1)
        await trainer.save(tmp_path)
        await trainer.close()
        await engine.close()

    run(scenario())
    for one in metrics:
        assert one["ratio_mean"] == pytest.approx(1.0, abs=1e-4) and one["actions"] == 8 * DENOISING.window_size
        assert one["grad_norm"] > 0
    directory = next(path.parent for path in tmp_path.rglob("model.safetensors"))
    again = open_denoiser(directory)
    assert isinstance(again, StableDiffusion3) and again.latent_shape == (4, 8, 8)
