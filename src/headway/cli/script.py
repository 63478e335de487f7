"""`headway train` for scripts and notebooks: the same checks, display and files; how it went is returned.

A reward that is a function is written into the run's configuration by its name, so it has to have one: defined in a
module, or in the script itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console

from headway.build.training import opened, prepare
from headway.cli.train import PIPE_WIDTH, conclude, introduce, resolved_of, shown
from headway.errors import ConfigError
from headway.flow.flow import RunSummary

__all__ = ["RunSummary", "train", "train_async"]

Overrides = Mapping[str, Any] | Iterable[str]
Rewards = Mapping[str, Callable[..., Any]]


def train(source: str | Mapping[str, Any], overrides: Overrides = (), *, rewards: Rewards | None = None) -> RunSummary:
    """Train to the end, or until it is interrupted; twice: `KeyboardInterrupt`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError("an event loop runs already, as in a notebook: await headway.train_async(...)")
    try:
        return asyncio.run(train_async(source, overrides, rewards=rewards))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def train_async(
    source: str | Mapping[str, Any], overrides: Overrides = (), *, rewards: Rewards | None = None
) -> RunSummary:
    """The same, awaited."""
    resolved = resolved_of(source, [*_words(overrides), *_words(_named(rewards or {}))])
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    prepared = prepare(resolved)
    with opened(prepared) as directory:
        done = directory.trained()
        if done >= resolved.config.max_steps:
            return RunSummary(trained=done, finished=True)
        introduce(prepared, done, console)
        summary = await shown(prepared, directory, console)
    conclude(prepared, summary, console)
    return summary


def _words(overrides: Overrides) -> list[str]:
    """As on the command line."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]


def _named(rewards: Rewards) -> dict[str, Any]:
    named = {}
    for name, function in rewards.items():
        module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
        if not callable(function) or module is None or not path or "<" in path:
            raise ConfigError(
                "has no name that it could be found by again",
                key=f"rewards.{name}",
                value=getattr(function, "__qualname__", repr(function)),
                hint="a function of a module, or of the script's outermost level",
            )
        named[f"rewards.{name}.reward_fn"] = f"{module}:{path}"
    return named
