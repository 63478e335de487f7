"""Agents that are somebody else's as environments of a run: `env_type: openai_agent`.

One endpoint serves all of them, on a port of this machine, from the first episode to the end of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from headway.build.backends import Policy
from headway.serving.chat import Dialect
from headway.serving.endpoint import RunEndpoint, check_installed
from headway.serving.foreign import ForeignAgents
from headway.serving.launch import launch_of

OPENAI_AGENT = "openai_agent"


def check_foreign(options: Mapping[str, Any]) -> None:
    """Whether an `env_config` describes an agent. Raises `ConfigError`."""
    check_installed()
    launch_of(options)


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
