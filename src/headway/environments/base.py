"""The environment protocol, and the one-step environment that verifiable tasks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from headway.types import Generation, SamplingParams, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees next, and what its last action earned."""

    tokens: Sequence[int] = ()
    """Appended to the context before the next turn; never trained."""
    fresh: bool = False
    """The context begins anew with `tokens`: the next turn sees nothing of those before it."""
    goes_on: bool = False
    """Likely not the last turn, and the one after it will see all of this one: engines may keep what they computed."""
    state: str = ""
    """Equal for equal states, where `tokens` also hold what is not of the state. Empty: not known."""
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    """With `done`: ended by a limit of ours, not by the environment."""
    info: Mapping[str, Any] = field(default_factory=dict)
    params: SamplingParams | None = None
    """Overrides the run's sampling for the next turn."""
    most_tokens: int | None = None
    """The next turn has no more than these, whatever the sampling allows."""
    stop: tuple[str, ...] = ()
    """Texts that end the next turn, besides those of the sampling."""
    hint: Any = None
    """Passed to the engine with the next request; only simulated engines read it."""


class Environment(Protocol):
    """One episode's world. Blocking work sits behind a thread or process inside the implementation."""

    async def reset(self, task: Task) -> Observation:
        """Start an episode. Raises `EnvironmentFailed`."""
        ...

    async def step(self, generation: Generation) -> Observation:
        """Act with what the policy made. Raises `EnvironmentFailed`."""
        ...

    async def close(self) -> None:
        """Release what the episode held. Called exactly once, also after failure or cancellation."""
        ...


@runtime_checkable
class ConcurrencyLimitedEnvironment(Protocol):
    """An environment of which only so many are played at once."""

    async def enter(self) -> None:
        """Wait for a place; the episode's clock does not run yet. `close` gives it back."""
        ...


class EnvironmentFactory(Protocol):
    """Makes an environment for a task; `domain` decides which."""

    def __call__(self, task: Task) -> Environment: ...


def extract_outcome(info: Mapping[str, Any]) -> dict[str, float]:
    """What `info` says about how an episode went, for those who count: success, turns, invalid."""
    found = {name: info.get(name) for name in ("success", "turns", "invalid")}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


class SingleTurnEnvironment:
    """Answer once, then done: RLVR as an environment."""

    __slots__ = ()

    async def reset(self, task: Task) -> Observation:
        return Observation(tokens=task.prompt)

    async def step(self, generation: Generation) -> Observation:
        return _DONE

    async def close(self) -> None:
        return None


_DONE = Observation(done=True)
