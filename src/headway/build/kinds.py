"""What differs between runs of language and of flow models: how the model is found, and which parts are made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.build import backends, images
from headway.build.backends import Machinery, Policy, Served
from headway.build.placement import Placement
from headway.config import Resolved
from headway.data import Sources
from headway.engines.base import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of model."""

    find_policy: Callable[[Resolved], Policy]
    check_lengths: Callable[[Resolved, Policy], None]
    """Raises `ConfigError` where the model cannot go as far as a sequence may."""
    make_machinery: Callable[[Resolved, Policy, Placement, Path | None], Machinery]
    make_served: Callable[[Resolved, Policy, Placement, Path | None], Served]
    make_own_engine: Callable[[Resolved, Policy, Placement, Path | None, str], Engine]
    """One more, by name."""
    check_sources: Callable[[Policy, Sources], None]
    """Raises `ConfigError` where the model cannot read the data."""


LANGUAGE = Kind(
    find_policy=backends.find_policy,
    check_lengths=backends.check_lengths,
    make_machinery=backends.make_machinery,
    make_served=backends.make_served,
    make_own_engine=backends.make_own_engine,
    check_sources=lambda policy, sources: None,
)
PICTURES = Kind(
    find_policy=images.find_policy,
    check_lengths=lambda resolved, policy: None,
    make_machinery=images.make_machinery,
    make_served=images.make_served,
    make_own_engine=images.make_own_engine,
    check_sources=images.check_sources,
)


def kind_of(resolved: Resolved) -> Kind:
    """By the pipeline of the configuration."""
    return PICTURES if resolved.derived.pipeline == "generative" else LANGUAGE
