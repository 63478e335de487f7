"""Runs `headway train` from scripts and notebooks, with the same checks, display and files, and returns the summary.

A reward that is a function is written into the run's configuration by its name, so it has to have one: defined in a
module, or in the script itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headway.cli.command_line import make_console, resolve_source
from headway.cli.train_command import print_conclusion, print_introduction, train_with_display
from headway.errors import ConfigError
from headway.flow.training_flow import RunSummary
from headway.launch.training_session import open_run_directory, prepare_run

__all__ = ["RunSummary", "train", "train_async"]

Overrides = Mapping[str, Any] | Iterable[str]
Rewards = Mapping[str, Callable[..., Any]]


def train(source: str | Mapping[str, Any], overrides: Overrides = (), *, rewards: Rewards | None = None) -> RunSummary:
    """Train to the end or until an interrupt. A second interrupt raises `KeyboardInterrupt`."""
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
    """Train like `train`, where an event loop runs already."""
    resolved = resolve_source(source, [*_to_words(overrides), *_to_words(_name_rewards(rewards or {}))])
    console = make_console()
    prepared = prepare_run(resolved)
    with open_run_directory(prepared) as directory:
        done = directory.count_trained_steps()
        if done >= resolved.config.max_steps:
            return RunSummary(trained=done, finished=True)
        print_introduction(prepared, done, console)
        summary = await train_with_display(prepared, directory, console)
    print_conclusion(prepared, summary, console)
    return summary


def _to_words(overrides: Overrides) -> list[str]:
    """Return overrides as they are written on the command line."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]


def _name_rewards(rewards: Rewards) -> dict[str, Any]:
    """Return the options that name these functions. Raise `ConfigError` for a function without a name."""
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
