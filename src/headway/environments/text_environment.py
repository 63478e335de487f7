"""Environments in words: what a user writes, at most twenty lines of it.

    class Guess:
        instructions = "Guess my number between 1 and 9. Answer with the number alone."
        max_steps = 4
        max_tokens = 8

        def reset(self, seed, data):
            self.secret = Random(seed).randint(1, 9)
            return "Your guess?"

        def step(self, action):
            if not action.strip().isdigit():
                return Reply("A number, please.", reward=-0.1, valid=False)
            right = int(action) == self.secret
            return Reply("Right." if right else "Wrong.", reward=float(right), done=right, success=right)

Methods may be `async`; those that are not run on threads. The class need not inherit from anything. Knows nothing of
tokens: `headway.environments.chat_turns` turns words into tokens and back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import Any, Protocol

from headway.errors import EnvironmentFailed

MAX_REPLY_CHARACTERS = 1_000_000
"""Characters of one reply. No policy reads more, and an environment that says more is broken."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to an action, or at the start."""

    text: str = ""
    """Shown to the policy before its next turn. Of the last reply only people see it."""
    reward: float = 0.0
    """What the action earned. The reward of an episode is the sum."""
    done: bool = False
    """The episode is over."""
    valid: bool = True
    """The action was understood. Others are counted, and cost `invalid_penalty` where the run has one."""
    success: bool | None = None
    """Whether the task is solved; `None`: not known yet, which at the end of an episode means no."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the reward or the reader of a log should know; that of the last reply is kept. JSON values only."""


class TextEnvironment(Protocol):
    """One world in which one episode at a time is played. What else it may have is in `EnvironmentTraits` and `close()`."""

    def reset(self, seed: int, data: Mapping[str, Any]) -> str | Reply | Awaitable[str | Reply]:
        """Begin an episode. Equal seeds and data begin equally: the members of a group get the same ones.

        `data` is the task's own, empty where the seed says everything.
        """
        ...

    def step(self, action: str) -> Reply | Awaitable[Reply]:
        """Act. `action` is what the policy said, as it said it, without stop strings."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTraits:
    """What a class, or an object of it, says about itself by attributes of these names; all of them optional."""

    instructions: str = ""
    """System message: what the policy has to know once."""
    max_steps: int | None = None
    """Turns after which an episode is cut off. `None`: the environment ends it itself."""
    max_tokens: int | None = None
    """Longest answer of one turn. `None`: what the run allows."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn."""
    concurrency: int | None = None
    """Episodes that may be played at once. `None`: any number."""
    workers: int = 0
    """Worker processes that it is best played in: more than 0 for whatever starts processes or may hang."""
    reusable: bool = False
    """`reset` makes it as good as new, so that one object serves episode after episode. `close()`, where there is
    one, is called once the object is no longer needed, also after a failure."""


def read_traits(environment: object) -> EnvironmentTraits:
    """The traits of an environment or of its class. Raises `EnvironmentFailed` where one has a wrong type."""
    given = {name: getattr(environment, name) for name in EnvironmentTraits.__slots__ if hasattr(environment, name)}
    if isinstance(given.get("stop"), str | list):
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    traits = EnvironmentTraits(**given)
    counts = (traits.max_steps, traits.max_tokens, traits.concurrency)
    right = (
        isinstance(traits.instructions, str)
        and isinstance(traits.stop, tuple)
        and all(isinstance(one, str) and one for one in traits.stop)
        and all(count is None or (isinstance(count, int) and count > 0) for count in counts)
    )
    if not right:
        raise EnvironmentFailed(f"{type(environment).__name__} has attributes of the wrong kind: {traits}")
    return traits


def check_reply(answer: object, *, started: bool) -> Reply:
    """What a method returned, checked. Raises `EnvironmentFailed` for nonsense."""
    what = "step" if started else "reset"
    if isinstance(answer, str) and not started:
        answer = Reply(answer)
    if not isinstance(answer, Reply):
        raise EnvironmentFailed(
            f"{what} returned {_shorten_repr(answer)}, not {'a Reply' if started else 'a text or a Reply'}"
        )
    reward = _to_finite_float(answer.reward)
    if reward is None:
        raise EnvironmentFailed(f"{what} gave the reward {_shorten_repr(answer.reward)}, which is no finite number")
    if not isinstance(answer.text, str) or not isinstance(answer.info, Mapping):
        raise EnvironmentFailed(f"{what} returned {_shorten_repr(answer)}: text must be a str and info a mapping")
    if len(answer.text) > MAX_REPLY_CHARACTERS:
        raise EnvironmentFailed(f"{what} said {len(answer.text)} characters, more than {MAX_REPLY_CHARACTERS}")
    return Reply(
        text=answer.text,
        reward=reward,
        done=bool(answer.done),
        valid=bool(answer.valid),
        success=None if answer.success is None else bool(answer.success),
        info=answer.info,
    )


def _to_finite_float(value: object) -> float | None:
    if not isinstance(value, Real) and type(value).__module__ != "numpy":
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def _shorten_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
