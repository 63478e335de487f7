"""Pretraining: deterministic, resumable bit for bit, and it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from headway.data.generated_tasks import StringSet  # noqa: E402
from headway.denoising.models.denoiser_storage import load_small_mmdit  # noqa: E402
from headway.denoising.models.mmdit import MmditConfig  # noqa: E402
from headway.denoising.pretraining import Pretrainer, PretrainingSettings, pretrain  # noqa: E402
from headway.denoising.text_rendering import TextImageStyle  # noqa: E402
from headway.errors import ConfigError  # noqa: E402

SMALL = PretrainingSettings(
    model=MmditConfig(height=8, width=8, alphabet="01", characters=1, dim=16, depth=1, heads=2),
    strings=StringSet(alphabet="01", shortest=1, longest=1),
    style=TextImageStyle(height=8, width=8, alphabet="01"),
    steps=6,
    batch=4,
    warmup=2,
)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_an_interrupted_pretraining_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = pretrain(SMALL, tmp_path / "whole")
    begun = Pretrainer(SMALL)
    for _ in range(3):
        begun.advance()
    begun.save(tmp_path / "parts")
    begun.advance()  # lost
    assert same(pretrain(SMALL, tmp_path / "parts"), whole)
    assert same(load_small_mmdit(tmp_path / "parts"), whole)
    assert not same(pretrain(replace(SMALL, seed=1), tmp_path / "other"), whole)


def test_another_pretraining_is_not_gone_on_with(tmp_path: Path) -> None:
    Pretrainer(SMALL).save(tmp_path)
    with pytest.raises(ConfigError, match="other settings"):
        Pretrainer(replace(SMALL, learning_rate=1.0)).resume(tmp_path)


def test_the_loss_falls() -> None:
    trainer = Pretrainer(replace(SMALL, steps=60, batch=8, learning_rate=1e-2))
    losses = [trainer.advance() for _ in range(60)]
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


def test_shapes_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="the pictures are"):
        replace(SMALL, style=TextImageStyle())
    with pytest.raises(ConfigError, match="longest string"):
        replace(SMALL, strings=StringSet(alphabet="01", shortest=1, longest=2))
