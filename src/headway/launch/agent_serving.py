"""Agents that are somebody else's as environments of a run: `env_type: openai_agent`.

One endpoint serves all of them, on a port of this machine, from the first episode to the end of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from headway.config import CustomEnvConfig
from headway.environments.text_environment import EnvironmentTraits
from headway.errors import ConfigError
from headway.launch.language_components import PolicyInfo
from headway.serving.agent_environment import AgentEndpoint, AgentEnvironmentFactory, require_aiohttp
from headway.serving.agent_launch import make_agent_launcher
from headway.serving.chat_template import ChatTemplate

OPENAI_AGENT = "openai_agent"
_UNSUPPORTED_OPTIONS = ("agent_system_template", "agent_template", "history", "max_invalid", "workers")
"""Options of environments in words."""


def check_agent_options(custom: CustomEnvConfig) -> EnvironmentTraits:
    """Check what is said of an agent; of itself it says nothing. Raises `ConfigError`."""
    require_aiohttp()
    usual = CustomEnvConfig()
    for name in _UNSUPPORTED_OPTIONS:
        value = getattr(custom, name)
        if value != getattr(usual, name):
            raise ConfigError(f"an agent of your own sees to its {name} itself", value=value)
    make_agent_launcher(custom.env_config)
    return EnvironmentTraits()


def make_chat_template(policy: PolicyInfo) -> ChatTemplate:
    """How the policy is spoken to."""
    from headway.models import find_end_tokens

    return ChatTemplate(policy.tokenizer, end_tokens=find_end_tokens(policy.path))


def make_run_endpoint(policy: PolicyInfo) -> AgentEndpoint:
    """Where the agents of a run ask; not started before the first of them."""
    return AgentEndpoint(make_chat_template(policy), model=policy.path.name)


def make_external_agents(
    endpoint: AgentEndpoint,
    options: Mapping[str, Any],
    *,
    context_tokens: int,
    max_turns: int | None = None,
    max_new_tokens: int | None = None,
    max_episodes: int | None = None,
) -> AgentEnvironmentFactory:
    """The environments of one kind of agent, from its `env_config`. Raises `ConfigError`."""
    return AgentEnvironmentFactory(
        launch=make_agent_launcher(options),
        endpoint=endpoint,
        context_tokens=context_tokens,
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
        admission=None if max_episodes is None else asyncio.Semaphore(max_episodes),
    )
