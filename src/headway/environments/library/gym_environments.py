"""Environments of the gymnasium and reasoning-gym libraries.

`gymnasium` plays any gymnasium environment, by its id, that can be shown as text (render mode `ansi`, or observations
that are texts, numbers or tuples of them) and acted in by words or numbers (`Discrete`, `Text`). Others are refused
when they are made. Colours become brackets: `[S]` is the position of the player.

`reasoning_gym` plays puzzles of reasoning-gym: an entry drawn from the seed, scored by the library, with several tries.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.environments.text_environment import Reply
from headway.errors import ConfigError, suggest_close_match
from headway.extras import import_optional
from headway.rewards.base import extract_boxed
from headway.sandbox.expression_guard import guard_evaluation, score_puzzle

_ACTION_NAMES = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""Names of the numbered actions of well-known environments."""
_COLOURED_TEXT = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)
_BRACKETS = {"34": ("(", ")"), "35": ("{", "}")}
"""Brackets for blue and magenta; every other colour marks the position of the player."""
_INSTRUCTIONS = "You are playing {name}. Each turn answer with one of these: {actions}."
_SOLVED_SCORE = 0.999


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
        gymnasium = import_optional("gymnasium", extra="gymnasium", key="env_type", value=id)
        try:
            spec = gymnasium.spec(id)
            self._has_ansi = "ansi" in _find_render_modes(spec.entry_point)
            self._game = gymnasium.make(id, **({"render_mode": "ansi"} if self._has_ansi else {}), **options)
        except (gymnasium.error.Error, TypeError, ImportError) as error:
            raise ConfigError(f"gymnasium does not make it: {error}", key="id", value=id) from error
        self._spaces = gymnasium.spaces
        self._actions = self._name_actions(id, actions)
        self.max_steps = max_steps or getattr(spec, "max_episode_steps", None)
        listed = ", ".join(self._actions) if self._actions else "any text"
        self.instructions = instructions or _INSTRUCTIONS.format(name=id.rpartition("-v")[0] or id, actions=listed)
        if not self._has_ansi and not self._is_readable(self._game.observation_space):
            raise ConfigError("cannot be shown as text", key="id", value=id, hint=f"{self._game.observation_space}")

    def _name_actions(self, name: str, actions: Sequence[str] | None) -> tuple[str, ...]:
        """Return a name for each number of the action space; none if any text is an action."""
        space = self._game.action_space
        if isinstance(space, self._spaces.Text):
            return ()
        if not isinstance(space, self._spaces.Discrete):
            raise ConfigError("one cannot act by words", key="id", value=name, hint=f"its actions are {space}")
        names = actions or _ACTION_NAMES.get(name.rpartition("-v")[0]) or [str(number) for number in range(space.n)]
        if len(set(names)) != space.n:
            raise ConfigError(f"there are {space.n} actions", key="actions", value=list(names))
        return tuple(names)

    def _is_readable(self, space: Any) -> bool:
        if isinstance(space, self._spaces.Tuple):
            return all(map(self._is_readable, space.spaces))
        if isinstance(space, self._spaces.Dict):
            return all(map(self._is_readable, space.spaces.values()))
        return isinstance(space, self._spaces.Discrete | self._spaces.Text)

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        observation, _ = self._game.reset(seed=seed % 2**32)
        return self._show(observation)

    def step(self, action: str) -> Reply:
        chosen = self._choose_action(action)
        if chosen is None:
            return Reply(f"Answer with one of {', '.join(self._actions)}.", valid=False)
        observation, reward, terminated, truncated, _ = self._game.step(chosen)
        done, success = bool(terminated or truncated), bool(terminated) and float(reward) > 0
        return Reply(self._show(observation), float(reward), done, success=success if done else None)

    def close(self) -> None:
        self._game.close()

    def _choose_action(self, action: str) -> Any:
        if not self._actions:
            return action
        words = re.findall(r"\w+", action.lower())
        named = {number for number, word in enumerate(self._actions) if word.lower() in words}
        return named.pop() if len(named) == 1 else None

    def _show(self, observation: Any) -> str:
        if self._has_ansi:
            return _COLOURED_TEXT.sub(_replace_colour, str(self._game.render())).strip()
        return _format_observation(observation)


def _replace_colour(coloured: re.Match[str]) -> str:
    first, last = _BRACKETS.get(coloured[1].rpartition(";")[2], ("[", "]"))
    return f"{first}{coloured[2]}{last}"


def _find_render_modes(entry_point: Any) -> Sequence[str]:
    from gymnasium.envs.registration import load_env_creator

    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return list(getattr(creator, "metadata", {}).get("render_modes", ()))


def _format_observation(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return ", ".join(f"{name} {_format_observation(value)}" for name, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(map(_format_observation, observation))
    return str(observation)


class ReasoningGymEnvironment:
    """`task` and its options; `tries` is the number of answers to a question, each of which is scored and reported.

    With `boxed`, an answer is what the last `\\boxed{}` holds; a text without one is invalid and scores 0.
    """

    reusable = True

    def __init__(self, task: str, *, tries: int = 1, boxed: bool = False, **options: Any) -> None:
        reasoning_gym = import_optional("reasoning_gym", extra="data", key="env_type", value="reasoning_gym")
        tasks = reasoning_gym.factory.DATASETS
        if task not in tasks:
            problem = f"is no task of reasoning-gym{suggest_close_match(task, tasks)}"
            raise ConfigError(problem, key="task", value=task)
        if tries < 1:
            raise ConfigError("must be at least 1", key="tries", value=tries)
        self._create_dataset, self._task, self._options = reasoning_gym.create_dataset, task, options
        self.max_steps, self._boxed = tries, boxed
        self.instructions = "Give the answer in \\boxed{}." if boxed else "Answer with the answer alone."
        try:
            self._dataset = self._create_dataset(task, size=1, seed=0, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym: {error}", key=task, value=options) from error
        guard_evaluation()

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self._dataset = self._create_dataset(self._task, size=1, seed=seed % 2**31, **self._options)
        self._entry, self._best_score, self._tries_left = self._dataset[0], 0.0, self.max_steps
        return str(self._entry["question"])

    def step(self, action: str) -> Reply:
        """Score an answer. The rewards of all tries add up to the best score."""
        answer = extract_boxed(action) if self._boxed else action
        score = 0.0 if answer is None else score_puzzle(self._dataset, self._task, answer.strip(), self._entry)
        gained, self._best_score = max(0.0, score - self._best_score), max(score, self._best_score)
        self._tries_left -= 1
        solved = score >= _SOLVED_SCORE
        done = solved or not self._tries_left
        text, success = "Right." if solved else "Not quite. Try again.", solved if done else None
        return Reply(text, gained, done, valid=answer is not None, success=success)
