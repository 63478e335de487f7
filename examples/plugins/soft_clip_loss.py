"""A policy loss of one's own: the importance weight is squashed smoothly instead of being cut off.

    plugins: [soft_clip_loss.py]
    pg_variant: soft_clip

`actions` holds tensors with one number per action: `logp_N` with gradient, `behaviour_N` from the engine and
`advantage_N`. A loss returns one number per action; masks, averages and the KL term are applied afterwards.
"""

import torch

import headway


@headway.register_loss("soft_clip", corrects_off_policy=True)
def soft_clip(actions, settings):
    """Return −w·A·ℓ with the weight w = 2·sigmoid(ℓ − ℓ_b), which is 1 on policy and never above 2."""
    weight = 2 * torch.sigmoid(actions.logp_N.detach() - actions.behaviour_N)
    return -weight * actions.advantage_N * actions.logp_N
