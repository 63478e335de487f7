"""The environment protocol, and the one-step environment that verifiable tasks use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from headway.types import Generation, SamplingParams, Task

TOOL_REWARDS, STATE_REWARDS, TOOL_PROBLEMS = "tool_rewards", "rollout_reward_scores", "tool_problems"
"""Keys in an episode's `info`: rewards that tools gave for calls, those for all of the episode by tool, and what went
wrong in tools without costing the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees next, and what its last action earned."""

    tokens: Sequence[int] = ()
    """Tokens appended to the context before the next turn. They are never trained."""
    starts_new_context: bool = False
    """The context restarts with `tokens`: the next turn sees nothing of the turns before it."""
    expects_next_turn: bool = False
    """Another turn that sees all of this one will probably follow, so engines may keep the KV cache."""
    state: str = ""
    """A key that is equal for equal states, even if `tokens` also hold other text. Empty if unknown."""
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    """Set together with `done` if a limit of the run ended the episode, not the environment."""
    info: Mapping[str, Any] = field(default_factory=dict)
    params: SamplingParams | None = None
    """Sampling parameters of the next turn, if they differ from those of the run."""
    max_new_tokens: int | None = None
    """Upper bound on the tokens of the next turn, whatever the sampling parameters allow."""
    stop: tuple[str, ...] = ()
    """Strings that end the next turn, besides those of the sampling parameters."""
    hint: Any = None
    """Passed to the engine with the next request; only simulated engines read it."""


class Environment(Protocol):
    """The environment of one episode. Implementations move blocking work to a thread or process."""

    async def reset(self, task: Task) -> Observation:
        """Start an episode. Raises `EnvironmentFailed`."""

    async def step(self, generation: Generation) -> Observation:
        """Apply the policy's turn. Raises `EnvironmentFailed`."""

    async def close(self) -> None:
        """Release what the episode held. Called exactly once, also after failure or cancellation."""


class ConcurrencyLimitedEnvironment(Protocol):
    """An environment that allows only a limited number of episodes at once."""

    async def enter(self) -> None:
        """Wait for a free slot, before the episode's clock starts. `close` frees the slot."""


def find_concurrency_limit(environment: object) -> ConcurrencyLimitedEnvironment | None:
    """Return the environment if it limits its episodes. An `isinstance` of a protocol takes 40 µs; this takes none."""
    return environment if hasattr(environment, "enter") else None


@runtime_checkable
class LocatableEnvironment(Protocol):
    """An environment that can say where a call is that takes long."""

    async def locate(self) -> str:
        """Return ` in function at file:line`, or nothing."""
        ...


class EnvironmentFactory(Protocol):
    """Makes an environment for a task; the task's `domain` selects which."""

    def __call__(self, task: Task) -> Environment: ...


def extract_outcome(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in an episode's `info` that statistics count: success, turns, invalid."""
    found = {name: info.get(name) for name in ("success", "turns", "invalid")}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def list_tool_problems(info: Mapping[str, Any]) -> list[str]:
    """Return what went wrong in the tools of an episode that counts all the same."""
    found = info.get(TOOL_PROBLEMS)
    return [str(one) for one in found] if isinstance(found, list | tuple) else []


class SingleTurnEnvironment:
    """Ends after one answer, which is all that a verifiable task needs."""

    __slots__ = ()

    async def reset(self, task: Task) -> Observation:
        return Observation(tokens=task.prompt)

    async def step(self, generation: Generation) -> Observation:
        return Observation(done=True)

    async def close(self) -> None:
        return None
