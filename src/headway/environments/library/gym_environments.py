"""Any environment of gymnasium that can be told in words, by its id: those of toy_text and others like them.

It can be if it is shown as text (render mode `ansi`, or observations that are texts, numbers or tuples of them), and if
one acts by words or by numbers (`Discrete`, `Text`). Others are refused when they are made. Colours become brackets:
`[S]` is where one stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from headway.environments.text_environment import Reply
from headway.errors import ConfigError

_ACTION_NAMES = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""What the numbers of well-known environments mean."""
_COLOURED_TEXT = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)
_BRACKETS = {"34": ("(", ")"), "35": ("{", "}")}
"""Blue and magenta; every other colour is where one stands."""
_INSTRUCTIONS = "You are playing {name}. Each turn answer with one of these: {actions}."


class GymnasiumEnvironment:
    """`id` and the options of `gymnasium.make`; `actions` names the numbers of a `Discrete` action space."""

    reusable = True

    def __init__(
        self,
        id: str,
        *,
        actions: Sequence[str] | None = None,
        instructions: str | None = None,
        max_steps: int | None = None,
        **options: Any,
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError("needs the package gymnasium", key="env_type", value=id) from error
        try:
            spec = gymnasium.spec(id)
            self._ansi = "ansi" in _find_render_modes(spec.entry_point)
            made: Any = gymnasium.make
            self._game = made(id, **({"render_mode": "ansi"} if self._ansi else {}), **options)
        except (gymnasium.error.Error, TypeError, ImportError) as error:
            raise ConfigError(f"gymnasium does not make it: {error}", key="id", value=id) from error
        self._spaces = gymnasium.spaces
        self._actions = self._named(id, actions)
        self.max_steps = max_steps or getattr(spec, "max_episode_steps", None)
        told = ", ".join(self._actions) if self._actions else "any text"
        self.instructions = instructions or _INSTRUCTIONS.format(name=id.rpartition("-v")[0] or id, actions=told)
        if not self._ansi and not self._readable(self._game.observation_space):
            raise ConfigError("cannot be shown as text", key="id", value=id, hint=f"{self._game.observation_space}")

    def _named(self, name: str, actions: Sequence[str] | None) -> tuple[str, ...]:
        space = self._game.action_space
        if isinstance(space, self._spaces.Text):
            return ()
        if not isinstance(space, self._spaces.Discrete):
            raise ConfigError("one cannot act by words", key="id", value=name, hint=f"its actions are {space}")
        words = actions or _ACTION_NAMES.get(name.rpartition("-v")[0]) or [str(number) for number in range(space.n)]
        if len(set(words)) != space.n:
            raise ConfigError(f"there are {space.n} actions", key="actions", value=list(words))
        return tuple(words)

    def _readable(self, space: Any) -> bool:
        if isinstance(space, self._spaces.Tuple):
            return all(map(self._readable, space.spaces))
        if isinstance(space, self._spaces.Dict):
            return all(map(self._readable, space.spaces.values()))
        return isinstance(space, self._spaces.Discrete | self._spaces.Text)

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        seen, _ = self._game.reset(seed=seed % 2**32)
        return self._shown(seen)

    def step(self, action: str) -> Reply:
        chosen = self._chosen(action)
        if chosen is None:
            return Reply(f"Answer with one of {', '.join(self._actions)}.", valid=False)
        seen, reward, terminated, truncated, _ = self._game.step(chosen)
        over, won = bool(terminated or truncated), bool(terminated) and float(reward) > 0
        return Reply(self._shown(seen), float(reward), over, success=won if over else None)

    def close(self) -> None:
        self._game.close()

    def _chosen(self, action: str) -> Any:
        if not self._actions:
            return action
        words = re.findall(r"\w+", action.lower())
        named = {number for number, word in enumerate(self._actions) if word.lower() in words}
        return named.pop() if len(named) == 1 else None

    def _shown(self, seen: Any) -> str:
        return (
            _COLOURED_TEXT.sub(_replace_colour, str(self._game.render())).strip()
            if self._ansi
            else _format_observation(seen)
        )


def _replace_colour(coloured: re.Match[str]) -> str:
    """Brackets instead of a colour: `[S]` where one stands."""
    first, last = _BRACKETS.get(coloured[1].rpartition(";")[2], ("[", "]"))
    return f"{first}{coloured[2]}{last}"


def _find_render_modes(entry_point: Any) -> Sequence[str]:
    from gymnasium.envs.registration import load_env_creator

    made = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return list(getattr(made, "metadata", {}).get("render_modes", ()))


def _format_observation(seen: Any) -> str:
    if isinstance(seen, Mapping):
        return ", ".join(f"{name} {_format_observation(value)}" for name, value in seen.items())
    if isinstance(seen, tuple):
        return ", ".join(map(_format_observation, seen))
    return str(seen)


_SOLVED_SCORE = 0.999


class ReasoningGymEnvironment:
    """`task` and its options; `tries` answers to a question, each judged and told."""

    instructions = "Answer with the answer alone."
    reusable = True

    def __init__(self, task: str, *, tries: int = 1, **options: Any) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError("needs the package reasoning-gym", key="task", value=task) from error
        if task not in DATASETS:
            close = get_close_matches(task, DATASETS, n=1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"is no task of reasoning-gym{meant}", key="task", value=task)
        if tries < 1:
            raise ConfigError("must be at least 1", key="tries", value=tries)
        self._make, self._task, self._options = reasoning_gym.create_dataset, task, options
        self.max_steps = tries
        try:
            self._dataset = self._make(task, size=1, seed=0, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym: {error}", key=task, value=options) from error

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self._dataset = self._make(self._task, size=1, seed=seed % 2**31, **self._options)
        self._entry, self._best, self._left = self._dataset[0], 0.0, self.max_steps
        return str(self._entry["question"])

    def step(self, action: str) -> Reply:
        """The reward of all tries together is that of the best."""
        score = float(self._dataset.score_answer(action.strip(), self._entry))
        gained, self._best = max(0.0, score - self._best), max(score, self._best)
        self._left -= 1
        right = score >= _SOLVED_SCORE
        over = right or not self._left
        return Reply("Right." if right else "Not quite. Try again.", gained, over, success=right if over else None)
