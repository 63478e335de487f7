"""Agents: the environments of a run, from its configuration.

    kinds_of     which environments there are, each checked before anything starts
    episodes     their starting states as tasks: a position is a tag, a seed, and a row where there are rows
    Worlds       makes an episode for a task, and lets go of everything at the end

Guarantees: equal configurations give equal tasks at equal positions, and held-out ones that are not trained; when the
worlds are closed, no process that an environment has started is left.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from headway.config import CustomEnvConfig, EnvManagerConfig, ResolvedConfig
from headway.data import DataSources, SizedSource
from headway.data.task_sources import InterleavedSource
from headway.environments.base import Environment, SingleTurnEnvironment
from headway.environments.chat_turns import ChatTurnEncoder
from headway.environments.environment_output import StandardStreamFilter
from headway.environments.environment_registry import (
    check_environment_options,
    find_environment_class,
    is_registered_in_process,
    make_environment,
)
from headway.environments.local_host import LocalEnvironmentHost
from headway.environments.text_environment import EnvironmentTraits, read_traits
from headway.environments.text_episode import HELD_OUT_KEY, EpisodeRules, TextEpisode
from headway.environments.worker_host import WorkerEnvironmentHost
from headway.errors import ConfigError, EnvironmentFailed
from headway.launch.agent_serving import (
    OPENAI_AGENT,
    check_agent_options,
    make_external_agents,
    make_run_endpoint,
)
from headway.launch.episode_sources import EpisodeSource, StartingRows, ValidationEpisodeSource, read_starting_rows
from headway.launch.language_components import PolicyInfo
from headway.processes.parent_watchdog import adopt_orphans, kill_children, list_children
from headway.serving.agent_environment import AgentEndpoint, AgentEnvironmentFactory
from headway.types import Task

_DEFAULT_VALIDATION_EPISODES = 64
"""Held-out episodes where nothing says how many."""


class EnvironmentPool(Protocol):
    """The environments of a run: a factory that holds something."""

    def __call__(self, task: Task) -> Environment: ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class SingleTurnPool:
    """Verifiable tasks are answered once."""

    def __init__(self) -> None:
        self._only = SingleTurnEnvironment()

    def __call__(self, task: Task) -> Environment:
        return self._only

    async def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """One tag of a manager, checked."""

    tag: str
    name: str
    """What the registry knows it by."""
    custom: CustomEnvConfig
    traits: EnvironmentTraits
    share: int
    """Groups that are played at once, redundant ones not counted: its part of the tasks."""
    places: int
    """Episodes that are played at once."""
    penalty: float


def make_environment_specs(resolved: ResolvedConfig, *, held_out: bool = False) -> list[EnvironmentSpec]:
    """The environments of training or of validation. Raises `ConfigError`."""
    key, manager = _select_manager(resolved, held_out)
    tags = manager.tags or tuple(resolved.config.custom_envs)
    if not tags:
        hint = "tags of custom_envs, or names of environments"
        raise ConfigError("which environments?", key=f"{key}.tags", value=[], hint=hint)
    groups = manager.num_env_groups or max(1, _DEFAULT_VALIDATION_EPISODES // manager.group_size)
    parts = manager.num_groups_partition or tuple(max(1, groups // len(tags)) for _ in tags)
    members, spare = manager.group_size, 0
    if not held_out:
        members, spare = resolved.derived.members_started, resolved.derived.additional_groups
    return [
        _make_spec(resolved, tag, share=part, places=(part + spare) * members, penalty=abs(manager.format_penalty))
        for tag, part in zip(tags, parts, strict=True)
    ]


def _select_manager(resolved: ResolvedConfig, held_out: bool) -> tuple[str, EnvManagerConfig]:
    config = resolved.config
    assert config.train_env_manager is not None
    if held_out and config.val_env_manager is not None:
        return "val_env_manager", config.val_env_manager
    return "train_env_manager", config.train_env_manager


def _make_spec(resolved: ResolvedConfig, tag: str, *, share: int, places: int, penalty: float) -> EnvironmentSpec:
    custom = resolved.config.custom_envs.get(tag, CustomEnvConfig())
    name, key = custom.env_type or tag, f"custom_envs.{tag}"
    if custom.agent_template is not None and "{observation}" not in custom.agent_template:
        raise ConfigError("has no {observation}", key=f"{key}.agent_template", value=custom.agent_template)
    if custom.workers and is_registered_in_process(name):
        hint = "module:Class is found there too"
        raise ConfigError("worker processes know nothing of what was registered here", key=f"{key}.env_type", hint=hint)
    try:
        given = json.dumps(dict(custom.env_config))
        traits = check_agent_options(custom) if name == OPENAI_AGENT else _read_traits(name, given)
    except (ConfigError, EnvironmentFailed) as error:
        raise ConfigError(str(error), key=key, value=name) from error
    return EnvironmentSpec(
        tag=tag, name=name, custom=custom, traits=traits, share=share, places=places, penalty=penalty
    )


@cache
def _read_traits(name: str, given: str) -> EnvironmentTraits:
    """What the environment says of itself. One is made to see that it can be, unless it belongs into workers."""
    options: dict[str, Any] = json.loads(given)
    made = find_environment_class(name)
    check_environment_options(made, name, options)
    if getattr(made, "workers", 0):
        return read_traits(made)
    environment = make_environment(name, **options)
    traits = read_traits(environment)
    close = getattr(environment, "close", None)
    if close is not None and not inspect.iscoroutinefunction(close):
        close()
    return traits


def make_episode_sources(resolved: ResolvedConfig, policy: PolicyInfo) -> DataSources:
    """The starting states of training, without end, and those of validation. Raises `ConfigError`."""
    train, validation = make_environment_specs(resolved), make_environment_specs(resolved, held_out=True)
    if any(kind.name != OPENAI_AGENT for kind in (*train, *validation)):
        for held_out in (False, True):
            _make_chat_tokens(resolved, policy, held_out=held_out)
    starts = read_starting_rows(resolved, [kind.tag for kind in (*train, *validation)])
    return DataSources(
        train=_make_training_source(resolved, train, starts),
        validation=_make_validation_source(resolved, validation, starts),
        notes=starts.notes,
    )


def _make_chat_tokens(resolved: ResolvedConfig, policy: PolicyInfo, *, held_out: bool) -> ChatTurnEncoder:
    """The tokens around turns. Validation has the variables of training unless it is given others."""
    variables = resolved.config.actor_train.data_args.chat_template_kwargs
    if held_out:
        variables = resolved.config.validation.data_args.chat_template_kwargs or variables
    return ChatTurnEncoder(policy.tokenizer, name=policy.path.name, variables=variables)


def _make_training_source(resolved: ResolvedConfig, kinds: list[EnvironmentSpec], starts: StartingRows) -> SizedSource:
    unused = starts.train.keys() - {kind.tag for kind in kinds}
    if unused:
        problem = f"has rows for {', '.join(sorted(unused))}, which is only validated on"
        raise ConfigError(problem, key="actor_train.data_args.file_name", hint="validation.data_args.file_name")
    sources = {
        kind.tag: EpisodeSource(
            kind.tag, seed=resolved.config.seed, identity=_identity(kind), rows=starts.train.get(kind.tag)
        )
        for kind in kinds
    }
    if len(kinds) == 1:
        return sources[kinds[0].tag]
    return InterleavedSource(sources, {kind.tag: float(kind.share) for kind in kinds})


def _make_validation_source(
    resolved: ResolvedConfig, kinds: list[EnvironmentSpec], starts: StartingRows
) -> SizedSource | None:
    """Of every tag equally many, as far as there are rows. A tag that is trained on rows is judged on rows alone."""
    judged = [kind for kind in kinds if kind.tag in starts.held_out or kind.tag not in starts.train]
    if not judged:
        return None
    wanted = resolved.config.val_batch_size
    each = -(-(wanted or sum(kind.places for kind in judged)) // len(judged))
    sources = []
    for kind in judged:
        rows = starts.held_out.get(kind.tag)
        size = each if rows is None else min(each, len(rows)) if wanted else len(rows)
        sources.append(
            EpisodeSource(
                kind.tag,
                seed=resolved.config.seed,
                identity=_identity(kind),
                size=size,
                data={HELD_OUT_KEY: True},
                rows=rows,
            )
        )
    return ValidationEpisodeSource(sources)


def _identity(kind: EnvironmentSpec) -> list[Any]:
    return [kind.name, dict(kind.custom.env_config)]


def make_environment_pool(resolved: ResolvedConfig, policy: PolicyInfo) -> EnvironmentPool:
    """The environments of a run, none of them begun. Raises `ConfigError` where the model cannot play in them."""
    if resolved.derived.pipeline != "agentic":
        return SingleTurnPool()
    longest = min(resolved.derived.sequence_length, policy.positions or resolved.derived.sequence_length)
    return AgentEnvironmentPool(resolved, policy, longest=longest)


class AgentEnvironmentPool:
    """Episodes of text environments, here or in worker processes, and of agents that are somebody else's."""

    def __init__(self, resolved: ResolvedConfig, policy: PolicyInfo, *, longest: int) -> None:
        self._kept = list_children()
        self._chats = cache(lambda held_out: _make_chat_tokens(resolved, policy, held_out=held_out))
        adopt_orphans()
        self._muffler = StandardStreamFilter()
        self.hosts: dict[str, LocalEnvironmentHost | WorkerEnvironmentHost] = {}
        self._kinds: dict[tuple[str, bool], tuple[EpisodeRules, asyncio.Semaphore]] = {}
        self._endpoint: AgentEndpoint | None = None
        self._foreign: dict[tuple[str, bool], AgentEnvironmentFactory] = {}
        for held_out in (False, True):
            for kind in make_environment_specs(resolved, held_out=held_out):
                if kind.name == OPENAI_AGENT:
                    self._endpoint = self._endpoint or make_run_endpoint(policy)
                    self._foreign[kind.tag, held_out] = _make_agents(self._endpoint, kind, longest)
                    continue
                if kind.tag not in self.hosts:
                    self.hosts[kind.tag] = _make_host(resolved, kind)
                self._kinds[kind.tag, held_out] = (_make_rules(kind, longest), asyncio.Semaphore(kind.places))

    def __call__(self, task: Task) -> Environment:
        key = task.domain, bool(task.data.get(HELD_OUT_KEY))
        if key in self._foreign:
            return self._foreign[key](task)
        rules, gate = self._kinds[key]
        return TextEpisode(self.hosts[task.domain].make_slot(), self._chats(key[1]), rules, gate)

    async def close(self) -> None:
        try:
            if self._endpoint is not None:
                await self._endpoint.close()
            await asyncio.gather(*(host.close() for host in self.hosts.values()), return_exceptions=True)
        finally:
            self._muffler.close()
            kill_children(self._kept)
            adopt_orphans(False)


def _make_host(resolved: ResolvedConfig, kind: EnvironmentSpec) -> LocalEnvironmentHost | WorkerEnvironmentHost:
    custom, options = kind.custom, dict(kind.custom.env_config)
    _, manager = _select_manager(resolved, held_out=False)
    seats = max(1, manager.max_env_num_per_worker)
    most = -(-kind.places // seats)
    suggested = most if manager.max_env_num_per_worker else min(kind.traits.workers, most)
    workers = suggested if custom.workers is None else custom.workers
    places = custom.concurrency or kind.traits.concurrency
    if workers and not is_registered_in_process(kind.name):
        return WorkerEnvironmentHost(
            kind.name, options, workers=workers, episodes_per_worker=seats, max_episodes=places
        )
    return LocalEnvironmentHost(kind.name, lambda: make_environment(kind.name, **options), max_episodes=places)


def _make_agents(endpoint: AgentEndpoint, kind: EnvironmentSpec, longest: int) -> AgentEnvironmentFactory:
    custom = kind.custom
    return make_external_agents(
        endpoint,
        custom.env_config,
        context_tokens=longest,
        max_turns=custom.max_steps,
        max_new_tokens=custom.max_tokens_per_step,
        max_episodes=custom.concurrency or kind.places,
    )


def _make_rules(kind: EnvironmentSpec, longest: int) -> EpisodeRules:
    custom = kind.custom
    return EpisodeRules(
        max_episode_tokens=longest,
        max_steps=custom.max_steps,
        max_invalid=custom.max_invalid,
        max_tokens=custom.max_tokens_per_step,
        invalid_penalty=kind.penalty,
        instructions=custom.agent_system_template,
        template=custom.agent_template,
        history=custom.history,
    )
