"""Translates estimators and policy losses of verl, with what each of them implies there.

verl whitens the advantages of some estimators, and averages some losses by sequence whatever `loss_agg_mode` says.
"""

from headway.config.foreign_entries import ForeignEntries
from headway.errors import ConfigError

_ACTOR, _NAME = "actor_rollout_ref.actor", "verl"
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss.loss_mode"
_PARTS, _MEMBERS = "algorithm.gdpo_reward", "actor_rollout_ref.rollout.n"
_OTHER_NAMES = {
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce",
    "reinforce_plus_plus_baseline": "grpo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
"""Estimators of verl that are one of ours with other settings."""
_OF_GROUPS = ("grpo", "grpo_vectorized", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Estimators that subtract nothing there where a group has one member."""
_WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_BY_SEQUENCE = ("gspo", "sapo", "geo_mean")


def translate_verl_algorithm(given: ForeignEntries) -> None:
    """Replace the estimator and the loss by ours."""
    whole = any(given.get(key) is not None for key in ("data.train_files", "actor_rollout_ref.model.path"))
    name = given.get(_ESTIMATOR) or ("gae" if whole else None)
    if name == "gdpo":
        _translate_parts(given)
    if given.take("algorithm.codapo_top_k") is not None or name == "codapo":
        note = "questions are weighted by their values; the second batch, of the best of them alone, is not drawn"
        given.notes.append(f"algorithm.codapo_top_k: changes nothing here; {note}")
    if name in _OF_GROUPS and whole and (given.get(_MEMBERS) or 1) == 1:
        given.take(_ESTIMATOR)
        given.give("adv_estimator", "grpo", f"{_ESTIMATOR}: {name}, of groups of one")
        for key in ("norm_mean_type", "norm_std_type"):
            given.give_default(key, "none", f"{_NAME} for groups of one")
        given.notes.append(f"{_ESTIMATOR}: {_MEMBERS} is 1, so that the reward itself is the advantage, as in {_NAME}")
    if name in _WHITENED:
        given.give_default("whiten_advantages", True, f"{_NAME} for {name}")
    if isinstance(name, str) and name in _OTHER_NAMES:
        given.take(_ESTIMATOR)
        given.give("adv_estimator", _OTHER_NAMES[name], f"{_ESTIMATOR}: {name}")
    if name == "reinforce_plus_plus_baseline":
        given.give("norm_mean_type", "group", f"{_ESTIMATOR}: {name}")
        given.give("norm_std_type", "none", f"{_ESTIMATOR}: {name}")
    _translate_loss(given)


def _translate_parts(given: ForeignEntries) -> None:
    """Translate the parts of rewards that are normalised one by one, with their weights."""
    keys, weights = given.take(f"{_PARTS}_keys"), given.take(f"{_PARTS}_weights")
    keys = keys if isinstance(keys, list) else []
    weights = weights if isinstance(weights, list) else [1.0] * len(keys)
    if not keys or len(weights) != len(keys):
        problem, hint = "needs parts of rewards, each with a weight", f"{_PARTS}_keys=[accuracy_reward, format_reward]"
        given.problems.append(ConfigError(problem, key=_ESTIMATOR, value="gdpo", hint=hint))
    for key, weight in zip(keys, weights, strict=False):
        given.give(f"gdpo_parts.{key}", weight, f"{_PARTS}_keys")


def _translate_loss(given: ForeignEntries) -> None:
    loss, mode = given.get(_LOSS), f"{_ACTOR}.loss_agg_mode"
    if loss in _BY_SEQUENCE:
        if given.take(mode) not in (None, "seq-mean-token-mean"):
            given.notes.append(f"{mode}: changes nothing with {loss}, which is averaged by sequence, as in {_NAME}")
        given.give_default("loss_agg_mode", "seq-mean-token-mean", f"{_NAME} for {loss}")
    if loss == "cispo":
        for side in ("low", "high"):
            value = given.take(f"{_ACTOR}.clip_ratio_{side}")
            clip = given.get(f"{_ACTOR}.clip_ratio") if value is None else value
            given.give(f"cispo_epsilon_{side}", 0.2 if clip is None else clip, f"{_ACTOR}.clip_ratio_{side}")
