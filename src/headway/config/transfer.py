"""Ways of moving weights that contradict what else was said. What depends on the machine is judged by `build`."""

from __future__ import annotations

from headway.config.draft import Draft
from headway.config.resolved import Derived
from headway.config.strategies import SERVERS

BLOCK = "weight_transfer"
_OWNERS = {"directory": "disk", "address": "broadcast"}
"""Options that one transport alone reads."""
_FOR_SERVERS = ("auto", "shared_memory", "disk")


def check_transfer(draft: Draft, derived: Derived) -> None:
    """Add what cannot be to `draft.problems`."""
    wanted = draft.config.weight_transfer
    for name, owner in _OWNERS.items():
        if getattr(wanted, name) is not None and wanted.transport != owner:
            draft.refuse(f"{BLOCK}.{name}", f"is read only by transport: {owner}, it is {wanted.transport}")
    if draft.config.processes is False and wanted.transport != "auto":
        problem = "processes is false, and inside one process weights are handed over"
        draft.refuse(f"{BLOCK}.transport", problem, "auto; or processes: true")
    if wanted.delta and (draft.config.processes is False or wanted.transport == "cuda_ipc"):
        why = "processes is false" if draft.config.processes is False else "transport is cuda_ipc"
        draft.refuse(f"{BLOCK}.delta", f"{why}: nothing travels that could be left out", "false")
    if derived.strategies.get("actor_infer") in SERVERS:
        if wanted.transport not in _FOR_SERVERS:
            problem = "servers are given directories to load"
            draft.refuse(f"{BLOCK}.transport", problem, f"one of {', '.join(_FOR_SERVERS)}")
        if wanted.delta:
            draft.refuse(f"{BLOCK}.delta", "servers load whole directories", "false")
