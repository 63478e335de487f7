"""Agents that are somebody else's as environments of a run: `env_type: openai_agent`.

One endpoint serves all of them, on a port of this machine, from the first episode to the end of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from headway.build.backends import Policy
from headway.config import CustomEnvConfig
from headway.environments.text import Traits
from headway.errors import ConfigError
from headway.serving.chat import Dialect
from headway.serving.endpoint import RunEndpoint, check_installed
from headway.serving.foreign import ForeignAgents
from headway.serving.launch import launch_of

OPENAI_AGENT = "openai_agent"
_NOT_OURS = ("agent_system_template", "agent_template", "history", "max_invalid", "workers")
"""Options of environments in words."""


def foreign_traits(custom: CustomEnvConfig) -> Traits:
    """Check what is said of an agent; of itself it says nothing. Raises `ConfigError`."""
    check_installed()
    usual = CustomEnvConfig()
    for name in _NOT_OURS:
        value = getattr(custom, name)
        if value != getattr(usual, name):
            raise ConfigError(f"an agent of your own sees to its {name} itself", value=value)
    launch_of(custom.env_config)
    return Traits()


def dialect_of(policy: Policy) -> Dialect:
    """How the policy is spoken to."""
    from headway.models import end_tokens

    return Dialect(policy.tokenizer, ends=end_tokens(policy.path))


def make_run_endpoint(policy: Policy) -> RunEndpoint:
    """Where the agents of a run ask; not started before the first of them."""
    return RunEndpoint(dialect_of(policy), model=policy.path.name)


def make_foreign_agents(
    endpoint: RunEndpoint,
    options: Mapping[str, Any],
    *,
    context_tokens: int,
    max_turns: int | None = None,
    most_tokens: int | None = None,
    places: int | None = None,
) -> ForeignAgents:
    """The environments of one kind of agent, from its `env_config`. Raises `ConfigError`."""
    return ForeignAgents(
        launch=launch_of(options),
        endpoint=endpoint,
        dialect=endpoint.dialect,
        context_tokens=context_tokens,
        max_turns=max_turns,
        most_tokens=most_tokens,
        places=None if places is None else asyncio.Semaphore(places),
        model=endpoint.model,
    )
