"""A denoising step is an action: the losses, corrections and aggregation of language models take it as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.algorithms.actions import Actions, BatchTotals
from headway.algorithms.denoising import DenoisingSampler, StepWindow, logp, make_timesteps
from headway.algorithms.losses import LossSettings, ppo
from headway.algorithms.objective import PolicyObjective
from headway.registry import POLICY_LOSSES
from tests.algorithms.factory import select
from tests.denoising_algorithms.factory import SAMPLERS, SHAPE, ReferenceStep, Toy, draw_window_steps, normal

both = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
GRID = make_timesteps(6, dtype=torch.float64)
WINDOW = StepWindow(1, 3)
SAMPLES = 4
ADVANTAGE = torch.tensor([1.3, -0.4, 0.2, -1.1], dtype=torch.float64)


def rolled_out(policy: Toy, sampler: DenoisingSampler) -> list[ReferenceStep]:
    noise = torch.Generator().manual_seed(9)
    start = torch.randn(SAMPLES, *SHAPE, generator=noise, dtype=torch.float64)
    return draw_window_steps(
        policy, start, GRID, sampler, WINDOW, lambda x: torch.randn(x.shape, generator=noise, dtype=x.dtype)
    )


def packed(actions: list[ReferenceStep]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, x_next, s, s_next and behaviour log-probabilities of all steps of all samples in one batch."""
    steps = torch.tensor([action.step for action in actions]).repeat_interleave(SAMPLES)
    x = torch.cat([action.x for action in actions])
    x_next = torch.cat([action.x_next for action in actions])
    return x, x_next, GRID[steps], GRID[steps + 1], torch.cat([action.logp for action in actions])


def logps(policy: Toy, sampler: DenoisingSampler, made: list[ReferenceStep]) -> Tensor:
    x, x_next, s, s_next, _ = packed(made)
    return logp(x_next, *sampler.step(x, policy(x, s), s, s_next))


def actions_of(logp_N: Tensor, behaviour_N: Tensor) -> Actions:
    return Actions(
        logp_N=logp_N,
        behaviour_N=behaviour_N,
        advantage_N=ADVANTAGE.repeat(WINDOW.length),
        mask_N=torch.ones(len(logp_N), dtype=torch.bool),
        sequence_N=torch.arange(SAMPLES).repeat(WINDOW.length),
        sequences=SAMPLES,
        proximal_N=behaviour_N + 0.01,
        reward_N=(ADVANTAGE > 0).double().repeat(WINDOW.length),
    )


def loss_of(name: str, actions: Actions) -> Tensor:
    totals = BatchTotals.of(actions.mask_N, actions.sequence_N, actions.sequences)
    return PolicyObjective(pg_variant=name)(actions, totals).loss


@both
def test_the_ratio_is_one_on_fresh_samples_whatever_the_batch(sampler: DenoisingSampler) -> None:
    """Rolled out four at a time and step by step, recomputed all at once in one packed batch."""
    policy = Toy()
    made = rolled_out(policy, sampler)
    behaviour = packed(made)[-1]
    with torch.no_grad():
        ratio = (logps(policy, sampler, made) - behaviour).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-13)
    with torch.no_grad():
        policy.outward += 0.05
        assert ((logps(policy, sampler, made) - behaviour).exp() - 1).abs().min() > 1e-4


@both
def test_on_fresh_samples_ppo_is_the_plain_policy_gradient(sampler: DenoisingSampler) -> None:
    policy = Toy()
    made = rolled_out(policy, sampler)
    gradients = []
    for name in ("ppo", "vanilla"):
        loss = loss_of(name, actions_of(logps(policy, sampler, made), packed(made)[-1]))
        gradients.append(torch.autograd.grad(loss, list(policy.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
        assert one.abs().max() > 0


@both
@pytest.mark.parametrize("name", POLICY_LOSSES.built_in)
def test_every_policy_loss_has_the_gradient_of_finite_differences(name: str, sampler: DenoisingSampler) -> None:
    """dL/dℓ of the loss, times dℓ along a direction by differences: what stands under a stop-gradient stays."""
    behaviour_policy, policy = Toy(), Toy()
    made = rolled_out(behaviour_policy, sampler)
    direction = normal(*policy.outward.shape, seed=4)
    with torch.no_grad():
        policy.outward += 0.02 * normal(*policy.outward.shape, seed=3)  # ahead of the behaviour policy
    behaviour = packed(made)[-1]
    logp_N = logps(policy, sampler, made)
    (gradient,) = torch.autograd.grad(loss_of(name, actions_of(logp_N, behaviour)), policy.outward)
    leaf_N = logp_N.detach().requires_grad_()
    (slope_N,) = torch.autograd.grad(loss_of(name, actions_of(leaf_N, behaviour)), leaf_N)
    with torch.no_grad():
        policy.outward += 1e-6 * direction
        above = logps(policy, sampler, made)
        policy.outward -= 2e-6 * direction
        below = logps(policy, sampler, made)
    expected = (slope_N * (above - below) / 2e-6).sum()
    torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-6, atol=1e-10)


def test_the_clip_of_a_denoising_step_is_narrow_because_log_probabilities_are_means() -> None:
    """24 dimensions: the ratio of the whole step is the 24th power of ours, so that 1e-4 here is 2.4e-3 there."""
    sampler, policy = SAMPLERS["cps"], Toy()
    made = rolled_out(policy, sampler)
    with torch.no_grad():
        policy.outward += 0.01
    actions = actions_of(logps(policy, sampler, made).detach(), packed(made)[-1])
    narrow = ppo(actions, LossSettings(clip_low=1e-4, clip_high=1e-4)).clipped_N
    wide = ppo(actions, LossSettings()).clipped_N
    assert narrow.any() and not wide.any()


def test_micro_batches_of_denoising_steps_add_up_to_the_batch() -> None:
    sampler, policy = SAMPLERS["flow_sde"], Toy(seed=7)
    made = rolled_out(Toy(), sampler)
    whole = actions_of(logps(policy, sampler, made).detach(), packed(made)[-1])
    totals = BatchTotals.of(whole.mask_N, whole.sequence_N, whole.sequences)
    objective = PolicyObjective(pg_variant="ppo", settings=LossSettings())
    parts = [objective(select(whole, torch.arange(i, 12, 3)), totals).loss for i in range(3)]
    torch.testing.assert_close(sum(parts), objective(replace(whole), totals).loss, rtol=1e-12, atol=1e-12)
