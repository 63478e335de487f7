"""The single-file reference computes what the algorithms do, and its ratio is 1 on fresh pictures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from headway.algorithms.denoising import CpsSampler, logp, make_timesteps  # noqa: E402
from headway.algorithms.returns import normalise_rewards  # noqa: E402
from headway.denoising.models.mmdit import MmditConfig, SmallMmdit  # noqa: E402

FILE = Path(__file__).parents[2] / "examples" / "reference_flow_grpo.py"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    pytest.importorskip("onnxruntime")
    spec = importlib.util.spec_from_file_location("reference_flow_grpo", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_model() -> SmallMmdit:
    model = SmallMmdit(MmditConfig(height=8, width=8, characters=4, dim=8, depth=1, heads=1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def test_a_step_and_its_density_are_those_of_the_algorithms(reference: ModuleType) -> None:
    options = reference.Options()
    grid = reference.make_timesteps(options)
    assert torch.allclose(grid, make_timesteps(options.denoising_steps, options.shift))
    x, v = torch.randn(2, 3, 1, 8, 8, generator=torch.Generator().manual_seed(1)).unbind(0)
    mean, std = reference.compute_transition(x, v, grid[2], grid[3], options)
    law = CpsSampler(options.noise).step(x, v, grid[2].expand(3), grid[3].expand(3))
    assert torch.allclose(mean, law.mean, atol=1e-6) and torch.allclose(std.expand(3), law.std)
    assert torch.allclose(reference.compute_logp(x, mean, std), logp(x, *law), atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_fresh_pictures_have_a_ratio_of_one_and_a_gradient(reference: ModuleType, shared: bool) -> None:
    options = reference.Options(group_size=4, shared_prefix=shared)
    model, generator = small_model(), torch.Generator().manual_seed(0)
    group = reference.sample_group(model, "47", 2, options, generator)
    for place, drawing in enumerate(group):
        drawing.reward = place / 3
    (advantage,) = reference.compute_advantages([group])
    loss = reference.compute_group_loss(model, group, advantage, options)
    assert float(loss.detach()) == pytest.approx(-options.window * float(advantage.sum()), abs=1e-4)
    loss.backward()
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0
    starts = torch.stack([drawing.befores[0] for drawing in group])
    assert bool((starts == starts[0]).all()) == shared
    ends = torch.stack([drawing.afters[0] for drawing in group])
    assert not bool((ends[0] == ends[1]).all())


def test_advantages_are_those_of_flow_grpo(reference: ModuleType) -> None:
    def group(*rewards: float) -> list[object]:
        empty = torch.zeros(0)
        return [reference.Drawing("4", None, empty, empty, empty, 0, reward) for reward in rewards]

    rewards = torch.tensor([0.0, 1.0, 0.5, 0.75])
    found = torch.cat(reference.compute_advantages([group(0.0, 1.0), group(0.5, 0.75)]))
    keep, groups = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    wanted = normalise_rewards(rewards, keep, groups, 2, mean_type="group", std_type="batch").clamp(-5, 5)
    assert torch.allclose(found, wanted.float(), rtol=1e-3)
