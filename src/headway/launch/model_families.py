"""What differs between runs of language and of flow models: how the model is found, and which parts are made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headway.config import ResolvedConfig
from headway.data import DataSources
from headway.engines.base import Engine
from headway.flow.backends import EngineReserve
from headway.launch import denoising_components, language_components
from headway.launch.inference_servers import uses_external_engines
from headway.launch.language_components import InferenceComponents, PolicyInfo, TrainingComponents
from headway.launch.placement import LENT_ENGINE, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One kind of model."""

    find_policy: Callable[[ResolvedConfig], PolicyInfo]
    check_lengths: Callable[[ResolvedConfig, PolicyInfo], None]
    """Raises `ConfigError` where the model cannot go as far as a sequence may."""
    make_machinery: Callable[[ResolvedConfig, PolicyInfo, Placement, Path | None], TrainingComponents]
    make_served: Callable[[ResolvedConfig, PolicyInfo, Placement, Path | None], InferenceComponents]
    make_own_engine: Callable[[ResolvedConfig, PolicyInfo, Placement, Path | None, str], Engine]
    """One more, by name."""
    check_sources: Callable[[PolicyInfo, DataSources], None]
    """Raises `ConfigError` where the model cannot read the data."""


LANGUAGE = ModelFamily(
    find_policy=language_components.find_policy,
    check_lengths=language_components.check_sequence_length,
    make_machinery=language_components.make_training_components,
    make_served=language_components.make_inference_components,
    make_own_engine=language_components.make_native_engine,
    check_sources=lambda policy, sources: None,
)
DENOISING = ModelFamily(
    find_policy=denoising_components.find_policy,
    check_lengths=lambda resolved, policy: None,
    make_machinery=denoising_components.make_training_components,
    make_served=denoising_components.make_inference_components,
    make_own_engine=denoising_components.make_engine_component,
    check_sources=denoising_components.check_prompts,
)


def select_model_family(resolved: ResolvedConfig) -> ModelFamily:
    """By the pipeline of the configuration."""
    return DENOISING if resolved.derived.pipeline == "denoising" else LANGUAGE


MAX_ENGINES_ON_CPU = 64


def make_run_components(
    resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None
) -> TrainingComponents:
    """Trainer and engines of a run, with whoever may come later. Servers are as many as they are."""
    kind = select_model_family(resolved)
    machinery = kind.make_machinery(resolved, policy, place, logs)
    if uses_external_engines(resolved):
        return machinery
    make = partial(kind.make_own_engine, resolved, policy, place, logs)
    lent = [make(LENT_ENGINE)] if resolved.config.lend_idle_trainer else []
    return replace(machinery, lent=lent, reserve=_make_reserve(place, make, machinery.engines))


def _make_reserve(place: Placement, make: Callable[[str], Engine], engines: list[Engine]) -> EngineReserve:
    """On the CPU of this machine as many as anybody may want; elsewhere those that the run was started with."""

    def made(name: str) -> Engine:
        engines.append(engine := make(name))  # closed with the others
        return engine

    if place.cluster is not None:
        why = "each engine has its room in the cluster"
    elif place.device == "cpu":
        return EngineReserve(make=made, most=MAX_ENGINES_ON_CPU, why=f"at most {MAX_ENGINES_ON_CPU} on one machine")
    else:
        why = "each engine has a GPU of its own" if place.cards else "the engines share the memory of one GPU"
    return EngineReserve(make=made, most=place.replicas, why=f"{why}, and {place.replicas} were given")
