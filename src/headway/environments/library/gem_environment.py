"""Worlds of GEM (`pip install 'headway[gem]'`), by their ids: `game:Wordle-v0-easy`, `game:Sokoban-v0`, and others.

An id without a level, such as `game:Wordle-v0`, is the game with the options that are given. GEM seeds the random
numbers of the whole process, so a process plays one episode at a time.
"""

from collections.abc import Mapping
from typing import Any

from headway.environments.text_environment import Reply
from headway.errors import ConfigError, EnvironmentFailed, suggest_close_match
from headway.extras import import_optional

_WORKERS = 4


class GemEnvironment:
    """Plays the world `id`; all other options are those of `gem.make`."""

    reusable = True
    workers = _WORKERS

    def __init__(self, id: str, **options: Any) -> None:
        import_optional("gem", extra="gem", key="env_type", value=id)
        registration = import_optional("gem.envs.registration", extra="gem", key="env_type", value=id)
        known = registration.ENV_REGISTRY
        levels = [one for one in known if one.startswith(f"{id}-")]
        if id not in known and not levels:
            raise ConfigError(f"is no world of GEM{suggest_close_match(id, known)}", key="env_type", value=id)
        try:
            if id in known:
                self._game = registration.make(id, **options)
            else:
                module, _, name = str(known[levels[0]].entry_point).partition(":")
                maker = getattr(import_optional(module, extra="gem", key="env_type", value=id), name)
                self._game = maker(**options)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"GEM does not make it: {error}", key="env_type", value=id) from error
        turns = getattr(self._game, "max_turns", None)
        self.max_steps = turns if isinstance(turns, int) and turns > 0 else None

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        observation, info = self._game.reset(seed=seed % 2**32)
        return _join_texts(observation, info)

    def step(self, action: str) -> Reply:
        observation, reward, terminated, truncated, info = self._game.step(action)
        done = bool(terminated or truncated)
        success = float(reward) >= 1.0 if done else None
        return Reply(_join_texts(observation, info), float(reward), done, success=success)


def _join_texts(observation: Any, info: Any) -> str:
    if not isinstance(observation, str):
        raise EnvironmentFailed(f"GEM shows a {type(observation).__name__}, and only text can be read")
    suffix = info.get("suffix") if isinstance(info, Mapping) else None
    return f"{observation}\n{suffix}" if isinstance(suffix, str) and suffix else observation
