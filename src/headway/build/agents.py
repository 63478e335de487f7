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

from headway.build.backends import Policy
from headway.build.episodes import EpisodeSource, HeldOutSource
from headway.build.foreign import OPENAI_AGENT, foreign_traits, make_foreign_agents, make_run_endpoint
from headway.build.starts import Starts, make_starts
from headway.config import CustomEnvConfig, EnvManagerConfig, Resolved
from headway.data import SizedSource, Sources
from headway.data.interleave import InterleavedSource
from headway.environments.base import Environment, SingleTurn
from headway.environments.chat import ChatTokens
from headway.environments.episode import HELD_OUT, Rules, TextEpisode
from headway.environments.local import LocalHost
from headway.environments.output import Muffler
from headway.environments.processes import children, end_children, take_in_orphans
from headway.environments.registry import check_options, environment_class, environment_named, is_registered
from headway.environments.text import Traits, traits_of
from headway.environments.workers import WorkerHost
from headway.errors import ConfigError, EnvironmentFailed
from headway.serving.endpoint import RunEndpoint
from headway.serving.foreign import ForeignAgents
from headway.types import Task

_EXAMINED = 64
"""Held-out episodes where nothing says how many."""


class Worlds(Protocol):
    """The environments of a run: a factory that holds something."""

    def __call__(self, task: Task) -> Environment: ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class SingleTurns:
    """Verifiable tasks are answered once."""

    def __init__(self) -> None:
        self._only = SingleTurn()

    def __call__(self, task: Task) -> Environment:
        return self._only

    async def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One tag of a manager, checked."""

    tag: str
    name: str
    """What the registry knows it by."""
    custom: CustomEnvConfig
    traits: Traits
    share: int
    """Groups that are played at once, redundant ones not counted: its part of the tasks."""
    places: int
    """Episodes that are played at once."""
    penalty: float


def kinds_of(resolved: Resolved, *, held_out: bool = False) -> list[Kind]:
    """The environments of training or of validation. Raises `ConfigError`."""
    key, manager = _manager(resolved, held_out)
    tags = manager.tags or tuple(resolved.config.custom_envs)
    if not tags:
        hint = "tags of custom_envs, or names of environments"
        raise ConfigError("which environments?", key=f"{key}.tags", value=[], hint=hint)
    groups = manager.num_env_groups or max(1, _EXAMINED // manager.group_size)
    parts = manager.num_groups_partition or tuple(max(1, groups // len(tags)) for _ in tags)
    members, spare = manager.group_size, 0
    if not held_out:
        members, spare = resolved.derived.members_started, resolved.derived.additional_groups
    return [
        _kind(resolved, tag, share=part, places=(part + spare) * members, penalty=abs(manager.format_penalty))
        for tag, part in zip(tags, parts, strict=True)
    ]


def _manager(resolved: Resolved, held_out: bool) -> tuple[str, EnvManagerConfig]:
    config = resolved.config
    assert config.train_env_manager is not None
    if held_out and config.val_env_manager is not None:
        return "val_env_manager", config.val_env_manager
    return "train_env_manager", config.train_env_manager


def _kind(resolved: Resolved, tag: str, *, share: int, places: int, penalty: float) -> Kind:
    custom = resolved.config.custom_envs.get(tag, CustomEnvConfig())
    name, key = custom.env_type or tag, f"custom_envs.{tag}"
    if custom.agent_template is not None and "{observation}" not in custom.agent_template:
        raise ConfigError("has no {observation}", key=f"{key}.agent_template", value=custom.agent_template)
    if custom.workers and is_registered(name):
        hint = "module:Class is found there too"
        raise ConfigError("worker processes know nothing of what was registered here", key=f"{key}.env_type", hint=hint)
    try:
        given = json.dumps(dict(custom.env_config))
        traits = foreign_traits(custom) if name == OPENAI_AGENT else _traits(name, given)
    except (ConfigError, EnvironmentFailed) as error:
        raise ConfigError(str(error), key=key, value=name) from error
    return Kind(tag=tag, name=name, custom=custom, traits=traits, share=share, places=places, penalty=penalty)


@cache
def _traits(name: str, given: str) -> Traits:
    """What the environment says of itself. One is made to see that it can be, unless it belongs into workers."""
    options: dict[str, Any] = json.loads(given)
    made = environment_class(name)
    check_options(made, name, options)
    if getattr(made, "workers", 0):
        return traits_of(made)
    environment = environment_named(name, **options)
    traits = traits_of(environment)
    close = getattr(environment, "close", None)
    if close is not None and not inspect.iscoroutinefunction(close):
        close()
    return traits


def episodes(resolved: Resolved, policy: Policy) -> Sources:
    """The starting states of training, without end, and those of validation. Raises `ConfigError`."""
    train, validation = kinds_of(resolved), kinds_of(resolved, held_out=True)
    if any(kind.name != OPENAI_AGENT for kind in (*train, *validation)):
        for held_out in (False, True):
            _chat(resolved, policy, held_out=held_out)
    starts = make_starts(resolved, [kind.tag for kind in (*train, *validation)])
    return Sources(
        train=_trained(resolved, train, starts), validation=_held_out(resolved, validation, starts), notes=starts.notes
    )


def _chat(resolved: Resolved, policy: Policy, *, held_out: bool) -> ChatTokens:
    """The tokens around turns. Validation has the variables of training unless it is given others."""
    variables = resolved.config.actor_train.data_args.chat_template_kwargs
    if held_out:
        variables = resolved.config.validation.data_args.chat_template_kwargs or variables
    return ChatTokens(policy.tokenizer, name=policy.path.name, variables=variables)


def _trained(resolved: Resolved, kinds: list[Kind], starts: Starts) -> SizedSource:
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


def _held_out(resolved: Resolved, kinds: list[Kind], starts: Starts) -> SizedSource | None:
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
                data={HELD_OUT: True},
                rows=rows,
            )
        )
    return HeldOutSource(sources)


def _identity(kind: Kind) -> list[Any]:
    return [kind.name, dict(kind.custom.env_config)]


def worlds_of(resolved: Resolved, policy: Policy) -> Worlds:
    """The environments of a run, none of them begun. Raises `ConfigError` where the model cannot play in them."""
    if resolved.derived.pipeline != "agentic":
        return SingleTurns()
    longest = min(resolved.derived.sequence_length, policy.positions or resolved.derived.sequence_length)
    return AgentWorlds(resolved, policy, longest=longest)


class AgentWorlds:
    """Episodes of text environments, here or in worker processes, and of agents that are somebody else's."""

    def __init__(self, resolved: Resolved, policy: Policy, *, longest: int) -> None:
        self._kept = children()
        self._chats = cache(lambda held_out: _chat(resolved, policy, held_out=held_out))
        take_in_orphans()
        self._muffler = Muffler()
        self.hosts: dict[str, LocalHost | WorkerHost] = {}
        self._kinds: dict[tuple[str, bool], tuple[Rules, asyncio.Semaphore]] = {}
        self._endpoint: RunEndpoint | None = None
        self._foreign: dict[tuple[str, bool], ForeignAgents] = {}
        for held_out in (False, True):
            for kind in kinds_of(resolved, held_out=held_out):
                if kind.name == OPENAI_AGENT:
                    self._endpoint = self._endpoint or make_run_endpoint(policy)
                    self._foreign[kind.tag, held_out] = _agents(self._endpoint, kind, longest)
                    continue
                if kind.tag not in self.hosts:
                    self.hosts[kind.tag] = _host(resolved, kind)
                self._kinds[kind.tag, held_out] = (_rules(kind, longest), asyncio.Semaphore(kind.places))

    def __call__(self, task: Task) -> Environment:
        key = task.domain, bool(task.data.get(HELD_OUT))
        if key in self._foreign:
            return self._foreign[key](task)
        rules, gate = self._kinds[key]
        return TextEpisode(self.hosts[task.domain].seat(), self._chats(key[1]), rules, gate)

    async def close(self) -> None:
        try:
            if self._endpoint is not None:
                await self._endpoint.close()
            await asyncio.gather(*(host.close() for host in self.hosts.values()), return_exceptions=True)
        finally:
            self._muffler.close()
            end_children(self._kept)
            take_in_orphans(False)


def _host(resolved: Resolved, kind: Kind) -> LocalHost | WorkerHost:
    custom, options = kind.custom, dict(kind.custom.env_config)
    _, manager = _manager(resolved, held_out=False)
    seats = max(1, manager.max_env_num_per_worker)
    most = -(-kind.places // seats)
    suggested = most if manager.max_env_num_per_worker else min(kind.traits.workers, most)
    workers = suggested if custom.workers is None else custom.workers
    places = custom.concurrency or kind.traits.concurrency
    if workers and not is_registered(kind.name):
        return WorkerHost(kind.name, options, workers=workers, seats=seats, places=places)
    return LocalHost(kind.name, lambda: environment_named(kind.name, **options), places=places)


def _agents(endpoint: RunEndpoint, kind: Kind, longest: int) -> ForeignAgents:
    custom = kind.custom
    return make_foreign_agents(
        endpoint,
        custom.env_config,
        context_tokens=longest,
        max_turns=custom.max_steps,
        most_tokens=custom.max_tokens_per_step,
        places=custom.concurrency or kind.places,
    )


def _rules(kind: Kind, longest: int) -> Rules:
    custom = kind.custom
    return Rules(
        longest=longest,
        max_steps=custom.max_steps,
        max_invalid=custom.max_invalid,
        max_tokens=custom.max_tokens_per_step,
        invalid_penalty=kind.penalty,
        instructions=custom.agent_system_template,
        template=custom.agent_template,
        history=custom.history,
    )
