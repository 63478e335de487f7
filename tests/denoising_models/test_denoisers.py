"""What every denoising model promises to engines and trainers, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.algorithms.denoising import CpsSampler, logp, make_timesteps
from headway.denoising.models.denoiser import Conditioning
from tests.denoising_models.factory import PROMPTS, noise, small, tiny_sd3

MAKERS: dict[str, Callable[[], Any]] = {"small": small, "sd3": tiny_sd3}
LEVELS = torch.tensor([1.0, 0.7, 0.4, 0.05])
"""Each sample at another noise level."""


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "sd3":
        pytest.importorskip("diffusers")
    return MAKERS[request.param]()


def test_velocities_have_the_shape_of_latents(model: Any) -> None:
    x = noise(4, *model.latent_shape)
    v = model(x, LEVELS, model.encode(PROMPTS))
    assert v.shape == x.shape and v.isfinite().all() and v.std() > 0.01


def test_a_row_depends_on_nothing_but_itself(model: Any) -> None:
    x, told = noise(4, *model.latent_shape), model.encode(PROMPTS)
    with torch.no_grad():
        together = model(x, LEVELS, told)
        for row in range(4):
            one = slice(row, row + 1)
            alone = model(x[one], LEVELS[one], model.encode(PROMPTS[one]))
            torch.testing.assert_close(alone, together[one], rtol=1e-4, atol=1e-5)


def test_prompt_and_noise_level_matter(model: Any) -> None:
    x = noise(1, *model.latent_shape)
    with torch.no_grad():
        base = model(x, LEVELS[1:2], model.encode(["42"]))
        for level, prompt in ((0.4, "42"), (0.7, "24"), (0.7, "")):
            assert (model(x, torch.tensor([level]), model.encode([prompt])) - base).abs().max() > 1e-4


def test_the_same_prompt_is_encoded_the_same_in_any_company(model: Any) -> None:
    many, alone = model.encode(PROMPTS), model.encode(PROMPTS[1:2])
    for name, rows in many.tensors.items():
        torch.testing.assert_close(rows[1:2], alone[name], rtol=1e-5, atol=1e-6)
        assert not rows.requires_grad


def test_pictures_are_three_colours_between_zero_and_one(model: Any) -> None:
    pictures = model.decode(3 * noise(2, *model.latent_shape))
    assert pictures.shape[:2] == (2, 3) and pictures.dtype == torch.float32
    assert pictures.min() >= 0 and pictures.max() <= 1 and not pictures.requires_grad


def test_its_grid_falls_from_one_to_zero(model: Any) -> None:
    grid = model.make_timesteps(5)
    assert grid.shape == (6,) and grid[0] == 1 and grid[-1] == 0 and (grid.diff() < 0).all()


def test_what_is_trained_is_what_state_dict_names(model: Any) -> None:
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert all(parameter.requires_grad for _, parameter in model.named_parameters())


def test_gradients_of_log_probabilities_are_finite_differences(model: Any) -> None:
    model = model.double()
    x, x_next = noise(4, *model.latent_shape, dtype=torch.float64), noise(4, *model.latent_shape, seed=1).double()
    grid = make_timesteps(4, dtype=torch.float64)
    s, s_next, told = grid[:3].repeat(2)[:4], grid[1:4].repeat(2)[:4], model.encode(PROMPTS)

    def density() -> torch.Tensor:
        return logp(x_next, *CpsSampler().step(x, model(x, s, told), s, s_next)).sum()

    density().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    directions = [noise(*p.shape, seed=7, dtype=torch.float64) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True))
    found = []
    with torch.no_grad():
        for way in (1e-5, -2e-5):
            for p, d in zip(parameters, directions, strict=True):
                p += way * d
            found.append(density())
    torch.testing.assert_close(slope, (found[0] - found[1]) / 2e-5, rtol=1e-4, atol=1e-6)


def test_it_computes_in_half_precision_too(model: Any) -> None:
    x, told = noise(4, *model.latent_shape), model.encode(PROMPTS)
    with torch.no_grad():
        expected = model(x, LEVELS, told)
        made = model.to(torch.bfloat16)(x, LEVELS, told)
    assert made.dtype == torch.bfloat16
    assert (made.float() - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_it_is_trained_under_autocast(model: Any) -> None:
    x, told = noise(4, *model.latent_shape), model.encode(PROMPTS)
    with torch.autocast("cpu", torch.bfloat16):
        made = model(x, LEVELS, told)
    made.float().square().mean().backward()
    with torch.no_grad():
        expected = model(x, LEVELS, told)
    assert (made.float() - expected).abs().mean() < 0.05 * expected.abs().mean()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_conditioning_is_concatenated_by_rows() -> None:
    first, second = (Conditioning({"a": torch.arange(6).reshape(3, 2), "b": torch.arange(3)}) for _ in range(2))
    both = Conditioning.concatenate([first, second])
    assert both["a"].shape == (6, 2) and both["b"].tolist() == [0, 1, 2, 0, 1, 2]
    assert first.to("cpu")["a"].shape == (3, 2)
