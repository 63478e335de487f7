"""Clusters that contradict what else was said. Whether one is there and has what is wanted is judged by `build`."""

from __future__ import annotations

from headway.config.draft import Draft
from headway.config.resolved import Derived
from headway.config.strategies import SERVERS

_HERE = ("shared_memory", "cuda_ipc")
"""Ways of weights that do not leave a machine."""


def check_cluster(draft: Draft, derived: Derived) -> None:
    """Add what cannot be to `draft.problems`."""
    config, wanted = draft.config, draft.config.cluster
    transport = config.weight_transfer.transport
    if wanted.kind == "local":
        for name in ("address", "runtime_env"):
            if getattr(wanted, name):
                draft.refuse(f"cluster.{name}", "is read only by cluster.kind: ray, it is local")
        if transport == "object_store":
            draft.refuse("weight_transfer.transport", "is Ray's, and cluster.kind is local", "cluster.kind: ray")
        return
    if config.processes is False:
        draft.refuse("processes", "is false, and the parts of a run on Ray are processes", "true, or leave it out")
    if transport in _HERE:
        problem = "does not reach another machine of the Ray cluster"
        draft.refuse("weight_transfer.transport", problem, "auto, object_store, disk or broadcast")
    if derived.strategies.get("actor_infer") in SERVERS:
        problem = "servers are not started on Ray, nor fed from there"
        draft.refuse("cluster.kind", problem, "local, or the strategy of our own engines")
