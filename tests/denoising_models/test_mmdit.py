"""The small multimodal transformer: its size, its seed, its patches, its prompts, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.algorithms.denoising import add_noise
from headway.denoising.models.mmdit import MmditConfig, SmallMmdit, count_parameters
from headway.errors import ConfigError
from tests.denoising_models.factory import SMALL, noise, small


def test_by_default_it_is_a_million_parameters_and_it_can_be_hundreds() -> None:
    assert 0.8e6 < count_parameters(SmallMmdit()) < 1.5e6
    large = MmditConfig(height=128, width=128, channels=3, patch=8, dim=640, depth=10, heads=10)
    with torch.device("meta"):
        assert count_parameters(SmallMmdit(large)) > 100e6


def test_the_seed_decides_the_weights_and_nobody_elses_dice_are_touched() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = SmallMmdit(SMALL, seed=3), SmallMmdit(SMALL, seed=3), SmallMmdit(SMALL, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_it_begins_as_a_velocity_of_zero() -> None:
    model = SmallMmdit(SMALL)
    assert model(noise(2, 1, 8, 16), torch.tensor([0.3, 0.9]), model.encode(["1", "2"])).abs().max() == 0


def test_cutting_into_patches_loses_nothing() -> None:
    model = SmallMmdit(replace(SMALL, channels=3))
    x = noise(2, 3, 8, 16)
    patches = model._split_patches(x)
    assert patches.shape == (2, 8, 48)
    assert torch.equal(patches[0, 1].reshape(3, 4, 4), x[0, :, :4, 4:8])
    assert torch.equal(model._join_patches(patches), x)


def test_prompts_are_characters() -> None:
    model = small()
    ids = model.encode(["90", "", "0?1"])["characters"]
    assert ids.tolist() == [[11, 2, 0, 0, 0], [0, 0, 0, 0, 0], [2, 1, 3, 0, 0]]
    with pytest.raises(ConfigError, match="longer than the 5 characters"):
        model.encode(["123456"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 10}, "height = 10: is no multiple of patch"),
        ({"dim": 15}, "dim = 15: is no multiple of heads"),
        ({"depth": 0}, "depth = 0: must be at least 1"),
        ({"alphabet": "0120"}, "alphabet"),
        ({"channels": 2}, "channels = 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change)  # type: ignore[arg-type]


def test_it_learns_which_picture_belongs_to_which_prompt() -> None:
    """Two prompts, two pictures: with the right prompt the loss falls, with the wrong one it stays."""
    pictures = torch.stack([torch.full((1, 8, 16), -0.8), torch.full((1, 8, 16), 0.8)])
    model = SmallMmdit(SMALL)
    generator = torch.Generator().manual_seed(0)

    def loss(prompts: list[str]) -> torch.Tensor:
        x0 = pictures.repeat(4, 1, 1, 1)
        e = torch.randn(x0.shape, generator=generator)
        s = torch.rand(8, generator=generator)
        v = model(add_noise(x0, e, s), s, model.encode(prompts * 4))
        return (v - (e - x0)).square().mean()

    first = loss(["1", "2"]).item()
    for _ in range(45):
        slopes = torch.autograd.grad(loss(["1", "2"]), list(model.parameters()), allow_unused=True)
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                if slope is not None:
                    parameter -= 4e-3 * slope.sign()
    with torch.no_grad():
        right, wrong = loss(["1", "2"]).item(), loss(["2", "1"]).item()
    assert right < 0.6 * first and wrong > 1.5 * right
