"""Notes on what runs, but not as whoever wrote it may think.

Called once a configuration can run; looks at it and changes nothing. Each subject is one line, however many keys it is
about.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.config.draft import Draft, value_at
from headway.config.resolved import Derived

_STRATEGY = "strategy_args.strategy_config"
_UNREAD = {
    "model_args.attn_implementation": "auto",
    f"{_STRATEGY}.use_distributed_optimizer": True,
    f"{_STRATEGY}.sequence_parallel": False,
    f"{_STRATEGY}.recompute_granularity": None,
    f"{_STRATEGY}.block_size": 16,
    "infer_batch_size": 1,
}
"""Below a role: what nothing reads, and the value with which that makes no difference."""


def caution(draft: Draft, derived: Derived) -> None:
    """Add what is worth knowing to `draft.notes`."""
    _about_unread(draft)
    _about_truncation(draft, derived)
    _about_two_weights(draft)


def _about_unread(draft: Draft) -> None:
    """One line for all keys that are there for files of other frameworks."""
    said: dict[str, list[str]] = {}
    for role, key in _unread_of(draft):
        said.setdefault(key.rpartition(".")[2], []).append(role)
    names = [f"{name} ({', '.join(roles)})" for name, roles in said.items()]
    if draft.config.logging_steps != 1:
        names.append("logging_steps (every step has its line)")
    if names:
        draft.notes.append(
            f"{', '.join(names)}: not read here; trainer and engines choose their kernels, memory and forward batches"
        )


def _unread_of(draft: Draft) -> Iterator[tuple[str, str]]:
    """Role and key of everything given that nothing reads and that asks for something else than what is done."""
    roles = ("actor_train", "actor_infer", "reference", "critic", *(f"rewards.{name}" for name in draft.config.rewards))
    for key, usual in _UNREAD.items():
        for role in roles:
            if not draft.given(f"{role}.{key}") or value_at(draft.config, f"{role}.{key}") == usual:
                continue
            model = value_at(draft.config, f"{role}.model_args")
            whole = key.endswith("recompute_granularity") and not model.disable_gradient_checkpointing
            if not (whole and value_at(draft.config, f"{role}.{key}") == "full"):
                yield role, key


def _about_truncation(draft: Draft, derived: Derived) -> None:
    """Engines say how likely an action was among those left to draw from, the trainer among all.

    The ratio of the two is the share that was left: at least `top_p`, and unknown with `top_k` or `min_p`.
    """
    config, sampling = draft.config, draft.config.actor_infer.generating_args
    if derived.pipeline == "generative" or derived.strategies.get("actor_infer") == "sglang":
        return  # without such a draw, or of all actions as the trainer is
    unknown = sampling.top_k > 0 or sampling.min_p > 0
    outside = sampling.top_p < 1 - derived.pg_clip_low
    if (config.pg_variant == "ppo" and outside) or (config.pg_variant == "gspo" and (outside or unknown)):
        draft.notes.append(
            f"pg_variant: {config.pg_variant} with top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p "
            f"{sampling.min_p:g}: the engine's log-probabilities are of what was left to draw from, the trainer's of "
            f"all actions, so that ratios are below 1 on policy too; below 1 − {derived.pg_clip_low:g} (pg_clip_low) "
            "negative advantages have no gradient. top_p 1, top_k 0 and min_p 0 have none of this"
        )


def _about_two_weights(draft: Draft) -> None:
    if draft.config.pg_variant == "decoupled_ppo" and draft.config.train_infer_correction.is_weight.enabled:
        draft.notes.append(
            "train_infer_correction.is_weight: decoupled_ppo has the weight exp(ℓ_p − ℓ_b) already, and is weighted by "
            "it twice; leave one of them out"
        )
