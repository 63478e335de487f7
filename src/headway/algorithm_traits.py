"""Facts about policy losses and advantage estimators that a configuration is checked against.

Nothing here needs torch. The functions themselves are entries of `registry.POLICY_LOSSES` and
`registry.ADVANTAGE_ESTIMATORS`; `headway.algorithms.losses` and `headway.algorithms.advantages` register the built-in
ones when they are imported, and describe the signatures. A plugin registers function and traits together with
`register_policy_loss` and `register_advantage_estimator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headway.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """Facts about one policy loss. The defaults are safe for a loss that nothing is known about."""

    corrects_off_policy: bool = False
    """The loss weighs or clips by the ratio to the behaviour policy, so it may train on old samples."""
    needs_proximal: bool = False
    """The loss reads log-probabilities under the weights at the start of the step."""
    needs_whole_sequences: bool = False
    """The loss reads all actions of a sequence together, so micro-batches must not split one."""
    skips_zero_advantages: bool = False
    """An action with advantage 0 has no gradient, so samples that have only such actions can be left out."""
    reads_dual_clip: bool = False
    """The loss has the second clip of `dual_clip_loss`."""
    compares_actions: bool = False
    """The loss compares the actions of a micro-batch with each other, so how a batch is cut matters."""
    default_clip: tuple[float, float] | None = None
    """`pg_clip_low` and `pg_clip_high` where the configuration gives neither them nor `pg_clip`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageTraits:
    """Facts about one advantage estimator. The defaults fit an estimator that reads the reward of each sample."""

    default_norm: Literal["group", "batch", "none"] = "none"
    """`norm_mean_type` and `norm_std_type` where the configuration gives none."""
    compares_group_members: bool = False
    """The estimator is meant for groups of several samples of one prompt."""
    needs_several_members: bool = False
    """The estimator cannot be used with groups of one."""
    needs_critic: bool = False
    needs_greedy_member: bool = False
    """Every group has one more member, whose answer is greedy: it is a baseline and not trained."""
    needs_gradient_norms: bool = False
    """The estimator reads how far an action moves the logits, which the trainer computes when a step begins."""
    reads_parts: bool = False
    """The estimator reads the parts that a reward is made of, which differ even where whole rewards are equal."""
    reads_accuracy: bool = False
    """The estimator reads which answers are right, and how probable the engine found them."""
    reads_turns: bool = False
    """The estimator reads the rewards of single turns, which differ even where those of whole samples are equal."""


LOSS_TRAITS: Registry[LossTraits] = Registry("policy loss")
ADVANTAGE_TRAITS: Registry[AdvantageTraits] = Registry("advantage estimator")

for _name, _loss in {
    "ppo": LossTraits(corrects_off_policy=True, skips_zero_advantages=True, reads_dual_clip=True),
    "decoupled_ppo": LossTraits(
        corrects_off_policy=True, skips_zero_advantages=True, needs_proximal=True, reads_dual_clip=True
    ),
    "vanilla": LossTraits(skips_zero_advantages=True),
    "tis": LossTraits(corrects_off_policy=True, skips_zero_advantages=True),
    "cispo": LossTraits(corrects_off_policy=True, skips_zero_advantages=True),
    "sao": LossTraits(corrects_off_policy=True, skips_zero_advantages=True),
    "topr": LossTraits(corrects_off_policy=True, skips_zero_advantages=True),
    "kimi15": LossTraits(corrects_off_policy=True),
    "sapo": LossTraits(corrects_off_policy=True, skips_zero_advantages=True),
    "up": LossTraits(corrects_off_policy=True, skips_zero_advantages=True, reads_dual_clip=True),
    "clip_cov": LossTraits(corrects_off_policy=True, compares_actions=True),
    "kl_cov": LossTraits(corrects_off_policy=True, compares_actions=True),
    "dppo_tv": LossTraits(
        corrects_off_policy=True, skips_zero_advantages=True, reads_dual_clip=True, default_clip=(0.15, 0.15)
    ),
    "dppo_kl": LossTraits(
        corrects_off_policy=True, skips_zero_advantages=True, reads_dual_clip=True, default_clip=(0.05, 0.05)
    ),
    "cppo": LossTraits(
        corrects_off_policy=True,
        skips_zero_advantages=True,
        reads_dual_clip=True,
        needs_whole_sequences=True,
        default_clip=(0.15, 0.15),
    ),
    "gmpo": LossTraits(
        corrects_off_policy=True, skips_zero_advantages=True, needs_whole_sequences=True, default_clip=(0.4, 0.4)
    ),
    "gspo": LossTraits(
        corrects_off_policy=True, skips_zero_advantages=True, needs_whole_sequences=True, default_clip=(3e-4, 4e-4)
    ),
}.items():
    LOSS_TRAITS.register(_name, _loss)

for _name, _estimator in {
    "grpo": AdvantageTraits(default_norm="group", compares_group_members=True),
    "reinforce": AdvantageTraits(),
    "reinforce_plus_plus": AdvantageTraits(default_norm="batch"),
    "rloo": AdvantageTraits(compares_group_members=True, needs_several_members=True),
    "remax": AdvantageTraits(needs_several_members=True, needs_greedy_member=True),
    "opo": AdvantageTraits(compares_group_members=True, needs_several_members=True),
    "gpg": AdvantageTraits(compares_group_members=True, needs_several_members=True),
    "grpo_passk": AdvantageTraits(default_norm="group", compares_group_members=True, needs_several_members=True),
    "gdpo": AdvantageTraits(default_norm="group", compares_group_members=True, reads_parts=True),
    "codapo": AdvantageTraits(
        default_norm="group", compares_group_members=True, needs_several_members=True, reads_accuracy=True
    ),
    "optimal_token_baseline": AdvantageTraits(compares_group_members=True, needs_gradient_norms=True),
    "gae": AdvantageTraits(needs_critic=True),
    "step_reinforce": AdvantageTraits(default_norm="group", reads_turns=True),
    "gigpo": AdvantageTraits(default_norm="group", compares_group_members=True, reads_turns=True),
}.items():
    ADVANTAGE_TRAITS.register(_name, _estimator)


GREEDY_MARK = ".greedy."
"""Part of the sample id of a member whose answer is greedy: a baseline, and not trained."""


def is_greedy_member(sample_id: str) -> bool:
    """Return whether a sample is the greedy one of its group."""
    return GREEDY_MARK in sample_id


def register_policy_loss(name: str, function: Callable[..., Any], traits: LossTraits) -> None:
    """Make `name` a value of `pg_variant`. `headway.algorithms.losses` documents the signature of `function`."""
    POLICY_LOSSES.register(name, function)
    LOSS_TRAITS.register(name, traits, replace=True)


def register_advantage_estimator(name: str, function: Callable[..., Any], traits: AdvantageTraits) -> None:
    """Make `name` a value of `adv_estimator`. `headway.algorithms.advantages` documents the signature."""
    ADVANTAGE_ESTIMATORS.register(name, function)
    ADVANTAGE_TRAITS.register(name, traits, replace=True)
