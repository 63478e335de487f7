"""Text environments: the protocol that users implement, usually in twenty lines.

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

Methods may be `async`; other methods run on threads. The class does not have to inherit from anything. Nothing here
knows tokens: `headway.environments.chat_turns` converts text to tokens.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Real
from typing import Any, Protocol

from headway.errors import EnvironmentFailed

MAX_REPLY_CHARACTERS = 1_000_000
"""Longest text of one reply. No policy reads more; an environment that returns more is broken."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment answers to an action, or says at the start."""

    text: str = ""
    """Text that the policy sees before its next turn. Only people see the text of the last reply."""
    reward: float = 0.0
    """Reward of the action. The reward of an episode is the sum."""
    done: bool = False
    """Whether the episode is over."""
    valid: bool = True
    """Whether the action was understood. Invalid actions are counted and cost the run's `invalid_penalty`."""
    success: bool | None = None
    """Whether the task is solved. `None` means not known yet; at the end of an episode it counts as no."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for rewards and logs. The `info` of the last reply is kept with the episode."""
    instructions: str | None = None
    """System message of this episode, which only `reset` gives. `None`: that of the environment."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Signatures of the tools of this episode, which only `reset` gives. The chat template shows them."""
    tool_answers: Sequence[str] = ()
    """Answers of tools, each of which becomes a tool message where the chat template has such. Elsewhere `text`, which
    has to say the same, becomes a message of the user."""


class TextEnvironment(Protocol):
    """An environment that plays one episode at a time. `EnvironmentTraits` and `close()` are optional."""

    def reset(self, seed: int, data: Mapping[str, Any]) -> str | Reply | Awaitable[str | Reply]:
        """Begin an episode. Equal seeds and data must begin equally, because the members of a group share them.

        `data` holds the columns of the task's data row; it is empty if the task has only a seed.
        """

    def step(self, action: str) -> Reply | Awaitable[Reply]:
        """Apply an action: the policy's text as it was generated, without stop strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTraits:
    """Optional attributes of these names by which a class, or an object of it, describes itself."""

    instructions: str = ""
    """System message of the episode."""
    max_steps: int | None = None
    """Turns after which an episode is truncated. `None`: the environment ends episodes itself."""
    max_tokens: int | None = None
    """Longest answer of one turn. `None`: the limit of the run."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    runs_user_code: bool = False
    """Code that a user wrote runs inside, so it is played in worker processes, like an environment of a user."""
    concurrency: int | None = None
    """Largest number of episodes at once. `None`: unlimited."""
    workers: int = 0
    """Recommended number of worker processes: more than 0 for environments that start processes or may hang."""
    reusable: bool = False
    """`reset` restores the initial state, so one object can play many episodes. `close()`, if the class has one,
    is called when the object is no longer needed, also after a failure."""


def read_traits(environment: object) -> EnvironmentTraits:
    """Return the traits of an environment or of its class. Raises `EnvironmentFailed` if one has a wrong type."""
    given = {name: getattr(environment, name) for name in EnvironmentTraits.__slots__ if hasattr(environment, name)}
    if isinstance(given.get("stop"), str | list):
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    traits = EnvironmentTraits(**given)
    counts = (traits.max_steps, traits.max_tokens, traits.concurrency)
    is_correct = (
        isinstance(traits.instructions, str)
        and isinstance(traits.stop, tuple)
        and all(isinstance(one, str) and one for one in traits.stop)
        and all(count is None or (isinstance(count, int) and count > 0) for count in counts)
    )
    if not is_correct:
        raise EnvironmentFailed(f"{type(environment).__name__} has attributes of the wrong kind: {traits}")
    return traits


def check_reply(value: object, *, started: bool) -> Reply:
    """Validate what `reset` (`started=False`) or `step` returned. Raises `EnvironmentFailed` if it is no reply."""
    method = "step" if started else "reset"
    if isinstance(value, str) and not started:
        value = Reply(value)
    if not isinstance(value, Reply):
        raise EnvironmentFailed(
            f"{method} returned {_shorten_repr(value)}, not {'a Reply' if started else 'a text or a Reply'}"
        )
    reward = to_finite_float(value.reward)
    if reward is None:
        raise EnvironmentFailed(f"{method} gave the reward {_shorten_repr(value.reward)}, which is no finite number")
    if not isinstance(value.text, str) or not isinstance(value.info, Mapping):
        raise EnvironmentFailed(f"{method} returned {_shorten_repr(value)}: text must be a str and info a mapping")
    if not isinstance(value.instructions, str | None):
        raise EnvironmentFailed(f"{method} returned {_shorten_repr(value)}: instructions must be a str")
    if not all(isinstance(one, Mapping) for one in value.tools) or not all(
        isinstance(one, str) for one in value.tool_answers
    ):
        raise EnvironmentFailed(f"{method} returned {_shorten_repr(value)}: tools are mappings and tool_answers texts")
    if len(value.text) > MAX_REPLY_CHARACTERS:
        raise EnvironmentFailed(f"{method} said {len(value.text)} characters, more than {MAX_REPLY_CHARACTERS}")
    flags = {name: _to_flag(method, name, getattr(value, name)) for name in ("done", "valid", "success")}
    return replace(value, reward=reward, done=bool(flags["done"]), valid=bool(flags["valid"]), success=flags["success"])


def _to_flag(method: str, name: str, value: object) -> bool | None:
    """Convert a truth value of Python or numpy; `None` is only possible for `success`. Raises `EnvironmentFailed`."""
    if isinstance(value, bool) or (value is None and name == "success"):
        return value
    if (number := to_finite_float(value)) in (0.0, 1.0):
        return bool(number)
    raise EnvironmentFailed(f"{method} gave {name} = {_shorten_repr(value)}, which is neither true nor false")


def to_finite_float(value: object) -> float | None:
    """Convert a Python or numpy number to a float; return `None` for anything that is no finite number."""
    if not isinstance(value, Real) and type(value).__module__ != "numpy":
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else text


def _shorten_repr(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an object of the user's may fail at anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"
