"""The environments of an agentic run: which there are, which tasks they start from, and how episodes are made.

    make_environment_specs    the environments of a configuration, each checked before anything starts
    make_episode_sources      their starting states as tasks: a tag, a seed, and a row where there are rows
    make_environment_pool     makes an episode for a task, and closes everything at the end

Guarantees: equal configurations give equal tasks at equal positions in every process. Validation tasks come from
another random stream than training tasks. After the pool is closed, no process that an environment started is left.
"""

import asyncio
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Protocol

from headway.config import CustomEnvConfig, EnvManagerConfig, ResolvedConfig
from headway.data import DataSources, SizedSource
from headway.data.starting_rows import StartingRows, read_starting_rows
from headway.data.task_sources import InterleavedSource, ProportionalSource
from headway.environments.base import Environment, EnvironmentFactory, SingleTurnEnvironment
from headway.environments.chat_turns import ChatTurnEncoder
from headway.environments.environment_output import StandardStreamFilter
from headway.environments.environment_registry import (
    check_environment_options,
    find_environment_class,
    find_environment_path,
    is_built_in,
    make_environment,
)
from headway.environments.local_host import LocalEnvironmentHost
from headway.environments.text_environment import EnvironmentTraits, read_traits
from headway.environments.text_episode import HELD_OUT_KEY, SEED_KEY, EpisodeRules, TextEpisode
from headway.environments.worker_host import WorkerEnvironmentHost
from headway.errors import ConfigError, EnvironmentFailed
from headway.models.policy_info import PolicyInfo
from headway.processes.child_process import LIVE_PROCESSES, choose_memory_limit_mb
from headway.processes.loop_thread import LoopThread
from headway.processes.parent_watchdog import adopt_orphans, kill_children, list_children
from headway.seeding import make_rng
from headway.serving.agent_environment import AgentEndpoint, AgentEnvironmentFactory, require_aiohttp
from headway.serving.agent_launch import make_agent_launcher
from headway.serving.chat_template import ChatTemplate
from headway.types import Task
from headway.user_code import WorkingDirectory

OPENAI_AGENT = "openai_agent"
"""`env_type` of an agent that a user brings, and that asks an OpenAI-compatible endpoint of this run."""
_OPTIONS_OF_TEXT_ENVIRONMENTS = ("agent_system_template", "agent_template", "history", "max_invalid", "workers")
_DEFAULT_VALIDATION_EPISODES = 64
_MOST_DEFAULT_WORKERS = 8
"""Worker processes for an environment of a user that asks for no number."""
_NOMINAL_LENGTH = 1000
"""Length that an endless source reports."""


class EnvironmentPool(EnvironmentFactory, Protocol):
    """A factory of environments, which may hold processes and threads."""

    async def close(self) -> None:
        """Release everything that the environments use."""


class SingleTurnPool:
    """Pool for tasks that are answered once; all episodes share one stateless environment."""

    environment = SingleTurnEnvironment()

    def __call__(self, task: Task) -> Environment:
        return self.environment

    async def close(self) -> None:
        """Do nothing: the environment holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """One tag of an environment manager, checked."""

    tag: str
    name: str
    """Name of the environment in the registry."""
    custom: CustomEnvConfig
    traits: EnvironmentTraits
    share: int
    """Groups that are played at once, without `max_additional_running_prompts`; the tag's share of the tasks."""
    max_episodes: int
    """Episodes that are played at once."""
    penalty: float
    """Penalty for an answer in a wrong format."""

    @property
    def identity(self) -> list[Any]:
        """What decides how an episode goes, beside its seed."""
        return [self.name, dict(self.custom.env_config)]


def make_environment_specs(resolved: ResolvedConfig, *, held_out: bool = False) -> list[EnvironmentSpec]:
    """Return the environments of training or of validation. Raises `ConfigError`."""
    key, manager = _select_manager(resolved, held_out)
    tags = manager.tags or tuple(resolved.config.custom_envs)
    if not tags:
        hint = "tags of custom_envs, or names of environments"
        raise ConfigError("which environments?", key=f"{key}.tags", value=[], hint=hint)
    groups = manager.num_env_groups or max(1, _DEFAULT_VALIDATION_EPISODES // manager.group_size)
    shares = manager.num_groups_partition or tuple(max(1, groups // len(tags)) for _ in tags)
    members, spare = manager.group_size, 0
    if not held_out:
        derived = resolved.derived
        members, spare = derived.members_started, derived.additional_groups - max(0, groups - derived.slots)
    penalty = abs(manager.format_penalty)
    return [
        _make_spec(resolved, tag, share=share, max_episodes=(share + spare) * members, penalty=penalty)
        for tag, share in zip(tags, shares, strict=True)
    ]


def _select_manager(resolved: ResolvedConfig, held_out: bool) -> tuple[str, EnvManagerConfig]:
    config = resolved.config
    assert config.train_env_manager is not None
    if held_out and config.val_env_manager is not None:
        return "val_env_manager", config.val_env_manager
    return "train_env_manager", config.train_env_manager


def _make_spec(resolved: ResolvedConfig, tag: str, *, share: int, max_episodes: int, penalty: float) -> EnvironmentSpec:
    custom = resolved.config.custom_envs.get(tag, CustomEnvConfig())
    name, key = custom.env_type or tag, f"custom_envs.{tag}"
    template = custom.agent_template
    if template is not None and not any(one in template for one in ("{observation}", "{current_observation}")):
        raise ConfigError("has no {observation}", key=f"{key}.agent_template", value=template)
    if custom.workers and find_environment_path(name) is None:
        hint = "module:Class is found there too"
        raise ConfigError("worker processes know nothing of what was registered here", key=f"{key}.env_type", hint=hint)
    try:
        options = json.dumps(dict(custom.env_config))
        traits = _check_agent(custom) if name == OPENAI_AGENT else _read_traits(name, options)
    except (ConfigError, EnvironmentFailed) as error:
        raise ConfigError(str(error), key=key, value=name) from error
    return EnvironmentSpec(
        tag=tag,
        name=name,
        custom=custom,
        traits=traits,
        share=share,
        max_episodes=max_episodes,
        penalty=penalty if custom.format_penalty is None else abs(custom.format_penalty),
    )


def _check_agent(custom: CustomEnvConfig) -> EnvironmentTraits:
    """Check the options of a user's agent, which declares nothing itself. Raises `ConfigError`."""
    require_aiohttp()
    defaults = CustomEnvConfig()
    for name in _OPTIONS_OF_TEXT_ENVIRONMENTS:
        if (value := getattr(custom, name)) != getattr(defaults, name):
            raise ConfigError(f"an agent of your own sees to its {name} itself", value=value)
    make_agent_launcher(custom.env_config)
    return EnvironmentTraits()


@cache
def _read_traits(name: str, options_json: str) -> EnvironmentTraits:
    """Return what the environment declares; make one to see that it works, unless it belongs into worker processes."""
    options: dict[str, Any] = json.loads(options_json)
    factory = find_environment_class(name)
    check_environment_options(factory, name, options)
    if getattr(factory, "workers", 0):  # optional attributes of a class that a user wrote
        return read_traits(factory)
    environment = make_environment(name, **options)
    traits = read_traits(environment)
    close = getattr(environment, "close", None)
    if close is not None and not inspect.iscoroutinefunction(close):
        close()
    return traits


# -- tasks


class EpisodeSource:
    """Starting states of one environment as tasks: a position is a seed, and a row where there are rows.

    `identity` is what else decides how an episode goes; `size` is `None` for a source without end. A row's own seed
    replaces the drawn one.
    """

    def __init__(
        self,
        tag: str,
        *,
        seed: int,
        identity: Any,
        size: int | None = None,
        data: Mapping[str, Any] | None = None,
        rows: SizedSource | None = None,
    ) -> None:
        self._tag, self._seed, self._identity, self._size = tag, seed, identity, size
        self._data, self._rows = dict(data or {}), rows
        self._stream = "episodes" if size is None else "held-out episodes"

    def __len__(self) -> int:
        return _NOMINAL_LENGTH if self._size is None else self._size

    def task(self, position: int) -> Task | None:
        """Return the task at `position`; `None` past the end."""
        if position < 0:
            raise IndexError(f"position {position} is before the first task")
        if self._size is not None and position >= self._size:
            return None
        seed = make_rng(self._seed, self._stream, self._tag, position).randrange(0, 2**31)
        row = self._rows.task(position) if self._rows is not None else None
        data = {} if row is None else row.data
        return Task(position=position, domain=self._tag, data={SEED_KEY: seed, **data, **self._data})

    def fingerprint(self) -> str:
        """Return a hash of the environment, its options, the seed and the rows."""
        parts = [self._tag, self._seed, self._stream, self._identity]
        parts += [] if self._rows is None else [self._rows.fingerprint()]
        return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def make_episode_sources(resolved: ResolvedConfig, policy: PolicyInfo) -> DataSources:
    """Return the starting states of training, without end, and those of validation. Raises `ConfigError`."""
    train, validation = make_environment_specs(resolved), make_environment_specs(resolved, held_out=True)
    if any(spec.name != OPENAI_AGENT for spec in (*train, *validation)):
        for held_out in (False, True):
            _make_chat_encoder(resolved, policy, held_out=held_out)
    tags = [spec.tag for spec in (*train, *validation)]
    rows = read_starting_rows(resolved, tags, seed_key=SEED_KEY, reserved_key=HELD_OUT_KEY)
    return DataSources(
        train=_make_training_source(resolved, train, rows),
        validation=_make_validation_source(resolved, validation, rows),
        rows=sum(map(len, rows.train.values())) if all(spec.tag in rows.train for spec in train) else None,
        notes=rows.notes,
    )


def _make_training_source(resolved: ResolvedConfig, specs: list[EnvironmentSpec], rows: StartingRows) -> SizedSource:
    unused = rows.train.keys() - {spec.tag for spec in specs}
    if unused:
        problem = f"has rows for {', '.join(sorted(unused))}, which is only validated on"
        raise ConfigError(problem, key="actor_train.data_args.file_name", hint="validation.data_args.file_name")
    seed = resolved.config.seed
    sources = {
        spec.tag: EpisodeSource(spec.tag, seed=seed, identity=spec.identity, rows=rows.train.get(spec.tag))
        for spec in specs
    }
    if len(specs) == 1:
        return sources[specs[0].tag]
    return InterleavedSource(sources, {spec.tag: float(spec.share) for spec in specs})


def _make_validation_source(
    resolved: ResolvedConfig, specs: list[EnvironmentSpec], starts: StartingRows
) -> SizedSource | None:
    """Take equally many tasks of every tag, as far as there are rows; a tag trained on rows is validated on rows."""
    chosen = [spec for spec in specs if spec.tag in starts.held_out or spec.tag not in starts.train]
    if not chosen:
        return None
    wanted, seed = resolved.config.val_batch_size, resolved.config.seed
    per_tag = -(-(wanted or sum(spec.max_episodes for spec in chosen)) // len(chosen))
    sources, data = [], {HELD_OUT_KEY: True}
    for spec in chosen:
        rows = starts.held_out.get(spec.tag)
        size = per_tag if rows is None else min(per_tag, len(rows)) if wanted else len(rows)
        sources.append(EpisodeSource(spec.tag, seed=seed, identity=spec.identity, size=size, data=data, rows=rows))
    return ProportionalSource(sources)


def _make_chat_encoder(resolved: ResolvedConfig, policy: PolicyInfo, *, held_out: bool) -> ChatTurnEncoder:
    """Make the encoder of turns; validation uses the template variables of training unless it has its own."""
    variables = resolved.config.actor_train.data_args.chat_template_kwargs
    if held_out:
        variables = resolved.config.validation.data_args.chat_template_kwargs or variables
    return ChatTurnEncoder(policy.tokenizer, name=policy.path.name, variables=variables)


# -- the pool


def make_environment_pool(resolved: ResolvedConfig, policy: PolicyInfo) -> EnvironmentPool:
    """Make the environments of a run; none is started. Raises `ConfigError` where the model cannot play in them."""
    if resolved.derived.pipeline != "agentic":
        return SingleTurnPool()
    return AgentEnvironmentPool(resolved, policy)


class AgentEnvironmentPool:
    """Pool of text environments, in this process or in worker processes, and of agents that users bring."""

    def __init__(self, resolved: ResolvedConfig, policy: PolicyInfo) -> None:
        self._earlier_children = list_children()
        self._encoders = cache(lambda held_out: _make_chat_encoder(resolved, policy, held_out=held_out))
        adopt_orphans()
        self._stream_filter = StandardStreamFilter()
        self.hosts: dict[str, LocalEnvironmentHost | WorkerEnvironmentHost] = {}
        self._rules: dict[tuple[str, bool], tuple[EpisodeRules, asyncio.Semaphore]] = {}
        self._endpoint: AgentEndpoint | None = None
        self._agents: dict[tuple[str, bool], AgentEnvironmentFactory] = {}
        longest = min(resolved.derived.sequence_length, policy.positions or resolved.derived.sequence_length)
        for held_out in (False, True):
            for spec in make_environment_specs(resolved, held_out=held_out):
                if spec.name == OPENAI_AGENT:
                    self._endpoint = self._endpoint or AgentEndpoint(make_chat_template(policy), model=policy.path.name)
                    self._agents[spec.tag, held_out] = _make_agents(self._endpoint, spec, longest)
                    continue
                if spec.tag not in self.hosts:
                    self.hosts[spec.tag] = _make_host(resolved, spec)
                self._rules[spec.tag, held_out] = (_make_rules(spec, longest), asyncio.Semaphore(spec.max_episodes))

    def __call__(self, task: Task) -> Environment:
        key = task.domain, bool(task.data.get(HELD_OUT_KEY))
        if key in self._agents:
            return self._agents[key](task)
        rules, gate = self._rules[key]
        return TextEpisode(self.hosts[task.domain].make_slot(), self._encoders(key[1]), rules, gate)

    async def close(self) -> None:
        try:
            if self._endpoint is not None:
                await self._endpoint.close()
            await asyncio.gather(*(host.close() for host in self.hosts.values()), return_exceptions=True)
        finally:
            self._stream_filter.close()
            kill_children({*self._earlier_children, *LIVE_PROCESSES})
            adopt_orphans(False)


def make_chat_template(policy: PolicyInfo) -> ChatTemplate:
    """Return the chat template of the policy, for the OpenAI-compatible endpoint."""
    from headway.models.model_loading import find_end_tokens

    return ChatTemplate(policy.tokenizer, end_tokens=find_end_tokens(policy.path))


def _make_agents(endpoint: AgentEndpoint, spec: EnvironmentSpec, longest: int) -> AgentEnvironmentFactory:
    custom = spec.custom
    return AgentEnvironmentFactory(
        launch=make_agent_launcher(custom.env_config),
        endpoint=endpoint,
        context_tokens=longest,
        max_turns=custom.max_steps,
        max_new_tokens=custom.max_tokens_per_step,
        admission=asyncio.Semaphore(custom.concurrency or spec.max_episodes),
    )


def _make_host(resolved: ResolvedConfig, spec: EnvironmentSpec) -> LocalEnvironmentHost | WorkerEnvironmentHost:
    """Choose where an environment runs: those of users in worker processes, unless these cannot import it."""
    custom, options = spec.custom, dict(spec.custom.env_config)
    per_worker = _select_manager(resolved, held_out=False)[1].max_env_num_per_worker
    needed = -(-spec.max_episodes // max(1, per_worker))
    is_users, importable = spec.traits.runs_user_code or not is_built_in(spec.name), find_environment_path(spec.name)
    workers = custom.workers
    if workers is None:
        workers = needed if per_worker else min(spec.traits.workers, needed)
        if not workers and is_users:
            workers = min(spec.max_episodes, os.cpu_count() or 1, _MOST_DEFAULT_WORKERS)
            per_worker = -(-spec.max_episodes // workers)
    max_episodes = custom.concurrency or spec.traits.concurrency
    if workers and importable is not None:
        memory_mb = resolved.config.reliability.worker_memory_mb
        return WorkerEnvironmentHost(
            importable,
            options,
            workers=workers,
            episodes_per_worker=max(1, per_worker),
            max_episodes=max_episodes,
            memory_mb=choose_memory_limit_mb() if memory_mb is None else memory_mb,
        )
    loop_thread, directory = LoopThread(f"environment {spec.name}"), WorkingDirectory(spec.name)
    return LocalEnvironmentHost(
        spec.name,
        lambda: make_environment(spec.name, **options),
        max_episodes=max_episodes,
        loop_thread=loop_thread if is_users else None,
        after_call=directory.restore if is_users else lambda: None,
    )


def _make_rules(spec: EnvironmentSpec, longest: int) -> EpisodeRules:
    custom = spec.custom
    return EpisodeRules(
        max_episode_tokens=longest,
        max_steps=custom.max_steps,
        max_invalid=custom.max_invalid,
        max_tokens=custom.max_tokens_per_step,
        invalid_penalty=spec.penalty,
        instructions=custom.agent_system_template,
        template=custom.agent_template,
        history=custom.history,
        remembered_turns=(custom.history_length or 1) - 1,
    )
