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
