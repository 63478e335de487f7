"""The mathematics of denoising by flow matching: a denoising step is an action with a log-probability.

    timesteps = make_timesteps(steps)                                  # noise levels from 1 to 0
    transition = sampler.step(x, v, s, s_next, noisy)                  # FlowSdeSampler or CpsSampler
    x_next = transition.draw(z)
    behaviour = logp(x_next, *transition)                              # one number per sample, stored with the sample

The trainer calls the same `step` and `logp` on the stored x and x_next, with the velocity of the weights being trained.
Every policy loss of `headway.algorithms.losses` takes that log-probability. `nft_loss` needs no log-probabilities.

This package needs torch and nothing else. It knows no model and draws no noise.
"""

from headway.algorithms.denoising.denoising_samplers import (
    CpsSampler,
    DenoisingSampler,
    FlowSdeSampler,
    LatentTransition,
    euler_step,
    kl_compatible,
    kl_exact,
    logp,
    solve_ode,
)
from headway.algorithms.denoising.diffusion_nft import (
    DiffusionNftParams,
    advantage_to_optimality,
    nft_loss,
    old_policy_decay,
    update_old_policy,
)
from headway.algorithms.denoising.noise_levels import (
    add_noise,
    apply_guidance,
    make_timesteps,
    predict_data,
    predict_noise,
    shift_noise_levels,
)
from headway.algorithms.denoising.step_windows import (
    StepWindow,
    draw_random_window,
    make_full_window,
    make_sliding_window,
)

__all__ = [
    "CpsSampler",
    "DenoisingSampler",
    "DiffusionNftParams",
    "FlowSdeSampler",
    "LatentTransition",
    "StepWindow",
    "add_noise",
    "advantage_to_optimality",
    "apply_guidance",
    "draw_random_window",
    "euler_step",
    "kl_compatible",
    "kl_exact",
    "logp",
    "make_full_window",
    "make_sliding_window",
    "make_timesteps",
    "nft_loss",
    "old_policy_decay",
    "predict_data",
    "predict_noise",
    "shift_noise_levels",
    "solve_ode",
    "update_old_policy",
]
