"""The mathematics of flow matching: a denoising step as an action with a log-probability.

    grid = timesteps(steps)                                            # 1 … 0
    law = sampler.step(x, v, s, s_next, noisy)                         # FlowSde or Cps; noisy: inside its window
    x_next = law.draw(z)
    behaviour = logp(x_next, *law)                                     # one number per sample, kept with it

In training the same `step` and `logp` of the stored x and x_next, with the velocity under the weights being trained,
give ℓ; every policy loss of `headway.algorithms.losses` takes it from there. `nft_loss` needs no log-probabilities.

Needs torch and nothing else. Knows no model and draws no noise.
"""

from headway.algorithms.flow.advantages import group_advantages
from headway.algorithms.flow.nft import NftParams, follow, nft_loss, old_decay, optimality
from headway.algorithms.flow.paths import Action, Velocity, draw_window, solve_ode
from headway.algorithms.flow.samplers import (
    Cps,
    FlowSde,
    Sampler,
    Transition,
    euler_step,
    kl_compatible,
    kl_exact,
    logp,
)
from headway.algorithms.flow.timesteps import data_of, guided, noise_of, noised, shifted, timesteps
from headway.algorithms.flow.windows import Window, full_window, random_window, sliding_window

__all__ = [
    "Action",
    "Cps",
    "FlowSde",
    "NftParams",
    "Sampler",
    "Transition",
    "Velocity",
    "Window",
    "data_of",
    "draw_window",
    "euler_step",
    "follow",
    "full_window",
    "group_advantages",
    "guided",
    "kl_compatible",
    "kl_exact",
    "logp",
    "nft_loss",
    "noise_of",
    "noised",
    "old_decay",
    "optimality",
    "random_window",
    "shifted",
    "sliding_window",
    "solve_ode",
    "timesteps",
]
