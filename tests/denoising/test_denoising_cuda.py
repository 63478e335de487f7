"""On a GPU the same pictures are made and the same steps trained as on a CPU, captured or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.denoising.denoising_engine import DenoisingEngine
from headway.denoising.settings import DenoisingSettings
from headway.engines.native.settings import NativeSettings
from headway.types import Batch
from tests.denoising.factory import (
    groups_of,
    latent,
    local,
    make_model,
    make_trainer,
    request,
    run,
    serve,
    together,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DENOISING = DenoisingSettings(window="random", window_size=2)


def pictures(device: str, dtype: Any = "float32") -> tuple[list[Any], DenoisingEngine]:
    found: list[Any] = []

    async def scenario() -> None:
        engine = DenoisingEngine("engine/0", make_model, DENOISING, NativeSettings(slots=8, device=device, dtype=dtype))
        await serve(engine, make_model(seed=3))
        await serve(engine, make_model(), 1)
        asked = [request(f"{g}.{m}", str(g), group=g, steps=6) for g in (1, 2, 3) for m in range(4)]
        found.extend([await together(engine, asked), engine])
        await engine.close()

    run(scenario())
    return found[0], found[1]


def test_pictures_are_those_of_the_cpu() -> None:
    ours, engine = pictures("cuda")
    theirs, _ = pictures("cpu")
    assert engine.core is not None and engine.core.runner._captured is not None, "forward passes were captured"
    for one, other in zip(ours, theirs, strict=True):
        assert list(one.logps) == pytest.approx(list(other.logps), abs=1e-3)
        for step, same in zip(one.actions, other.actions, strict=True):
            assert step.trained == same.trained
            if step.after:
                torch.testing.assert_close(latent(step.after), latent(same.after), atol=1e-3, rtol=1e-3)


def test_half_precision_makes_ratios_that_are_one_within_the_clip() -> None:
    parts, _ = pictures("cuda", "bfloat16")
    exact, _ = pictures("cuda")
    gaps = [
        abs(a - b) for one, other in zip(parts, exact, strict=True) for a, b in zip(one.logps, other.logps, strict=True)
    ]
    assert max(gaps) < 0.2, "drawn along other paths, but from the same distributions"


def test_a_step_is_that_of_the_cpu() -> None:
    batch = Batch(trained=0, groups=groups_of(make_model(), (1, 2)))
    found = []
    for device in ("cpu", "cuda"):
        trainer = make_trainer(local=local(device=device), kl_coef=0.1)

        async def scenario(trainer: Any = trainer) -> None:
            found.append(dict(await trainer.train(batch)))
            manifest, buckets = await trainer.source.gather(1)
            assert [bucket.checksum async for bucket in buckets] == list(manifest.checksums)
            await trainer.close()

        run(scenario())
    assert found[1]["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-2)
    assert found[1]["ratio_max"] == pytest.approx(1.0, abs=1e-3)
