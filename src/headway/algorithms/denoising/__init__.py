"""The mathematics of flow matching: a denoising step as an action with a log-probability.

    grid = timesteps(steps)                                            # 1 … 0
    law = sampler.step(x, v, s, s_next, noisy)                         # FlowSde or Cps; noisy: inside its window
    x_next = law.draw(z)
    behaviour = logp(x_next, *law)                                     # one number per sample, kept with it

In training the same `step` and `logp` of the stored x and x_next, with the velocity under the weights being trained,
give ℓ; every policy loss of `headway.algorithms.losses` takes it from there. `nft_loss` needs no log-probabilities.

Needs torch and nothing else. Knows no model and draws no noise.
"""

from headway.algorithms.denoising.denoising_advantages import group_advantages
from headway.algorithms.denoising.denoising_samplers import (
    CpsSampler,
    DenoisingSampler,
    FlowSdeSampler,
    LatentTransition,
    euler_step,
    kl_compatible,
    kl_exact,
    logp,
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
    ReferenceStep,
    StepWindow,
    VelocityFunction,
    draw_random_window,
    draw_window_steps,
    make_full_window,
    make_sliding_window,
    solve_ode,
)

__all__ = [
    "CpsSampler",
    "DenoisingSampler",
    "DiffusionNftParams",
    "FlowSdeSampler",
    "LatentTransition",
    "ReferenceStep",
    "StepWindow",
    "VelocityFunction",
    "add_noise",
    "advantage_to_optimality",
    "apply_guidance",
    "draw_random_window",
    "draw_window_steps",
    "euler_step",
    "group_advantages",
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
