"""Headway: asynchronous RL post-training in which rollout runs ahead of training by a bounded distance.

    import headway

    headway.train("run.yaml", {"max_steps": 40}, rewards={"mine": closeness})

In a notebook: `await headway.train_async(...)`. Everything else is behind the names of the packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headway.version import VERSION

if TYPE_CHECKING:
    from headway.cli.script_training import RunSummary

__all__ = ["__version__", "train", "train_async"]
__version__ = VERSION


def train(
    source: str | Mapping[str, Any],
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> RunSummary:
    """`headway train`: a YAML file, a run's directory or a mapping, with `overrides` on top. Raises `ConfigError`.

    `rewards` are functions by name, as in the key `rewards`. An interrupt ends the run with a checkpoint.
    """
    from headway.cli.script_training import train

    return train(source, overrides, rewards=rewards)


async def train_async(
    source: str | Mapping[str, Any],
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> RunSummary:
    """The same where a loop runs already, as in a notebook."""
    from headway.cli.script_training import train_async

    return await train_async(source, overrides, rewards=rewards)
