"""Engines beyond those of the start: on the trainer's devices while it waits, and such as join a run at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from headway.build.backends import Machinery, Policy
from headway.build.kinds import kind_of
from headway.build.placement import LENT, Placement
from headway.build.servers import serves
from headway.config import Resolved
from headway.engines.base import Engine
from headway.flow.backends import Reserve

MOST_ON_CPU = 64


def make_fleet(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None) -> Machinery:
    """Trainer and engines of a run, with whoever may come later. Servers are as many as they are."""
    kind = kind_of(resolved)
    machinery = kind.make_machinery(resolved, policy, place, logs)
    if serves(resolved):
        return machinery
    make = partial(kind.make_own_engine, resolved, policy, place, logs)
    lent = [make(LENT)] if resolved.config.lend_idle_trainer else []
    return replace(machinery, lent=lent, reserve=_reserve(place, make, machinery.engines))


def _reserve(place: Placement, make: Callable[[str], Engine], engines: list[Engine]) -> Reserve:
    """On the CPU of this machine as many as anybody may want; elsewhere those that the run was started with."""

    def made(name: str) -> Engine:
        engines.append(engine := make(name))  # closed with the others
        return engine

    if place.cluster is not None:
        why = "each engine has its room in the cluster"
    elif place.device == "cpu":
        return Reserve(make=made, most=MOST_ON_CPU, why=f"at most {MOST_ON_CPU} on one machine")
    else:
        why = "each engine has a GPU of its own" if place.cards else "the engines share the memory of one GPU"
    return Reserve(make=made, most=place.replicas, why=f"{why}, and {place.replicas} were given")
