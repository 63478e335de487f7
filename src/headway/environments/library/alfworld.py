"""ALFWorld: household tasks as text, for installations that have its library and its game data.

The data (`alfworld-download`) is not part of any package: the option `data_path`, or `ALFWORLD_DATA`, names its folder.
The seed chooses a game of the split, among those marked solvable. The reward is 1 for the action that solves it.

This adapter was written to the interfaces of ALFWorld 0.4 and TextWorld 1.7 and tested only against a stand-in for
them, not against the games themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from headway.environments.optional_dependencies import import_optional_library
from headway.environments.response_parsing import extract_command
from headway.environments.text_environment import Reply
from headway.errors import ConfigError, EnvironmentFailed

_SPLITS = ("train", "valid_seen", "valid_unseen")
_INSTRUCTIONS = """You are in a house and have a task. Each turn answer with one action: <answer>action</answer>.
The actions that are possible now are listed after what you see."""


class ALFWorld:
    """Plays one game per episode; `data` may hold `game`, the path of a game file below the data folder."""

    instructions = _INSTRUCTIONS
    reusable = True

    def __init__(
        self, *, data_path: str = "", split: str = "train", max_steps: int = 50, list_actions: bool = True
    ) -> None:
        if split not in _SPLITS:
            raise ConfigError("is no split", key="split", value=split, hint=f"one of {', '.join(_SPLITS)}")
        folder = data_path or os.environ.get("ALFWORLD_DATA", "")
        self._textworld = import_optional_library("textworld", extra="alfworld", wanted_by="alfworld")
        self._wrappers = import_optional_library(
            "alfworld.agents.environment.alfred_tw_env", extra="alfworld", wanted_by="alfworld"
        )
        self._folder = Path(folder).expanduser()
        self._games = _find_games(str(self._folder), split) if folder else ()
        if not self._games:
            hint = "run alfworld-download and name its folder"
            raise ConfigError(f"there are no games of {split} below it", key="data_path", value=folder, hint=hint)
        self.max_steps, self._list_actions = max_steps, list_actions
        self._world: Any = None

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self.close()
        game = self._folder / str(data["game"]) if "game" in data else self._choose_game(seed)
        infos = self._textworld.EnvInfos(won=True, admissible_commands=True, feedback=True)
        wrappers = [self._wrappers.AlfredDemangler(shuffle=False)]
        self._world = self._textworld.start(str(game), infos, wrappers=wrappers)
        self._state = self._world.reset()
        self._steps = 0
        return self._show()

    def step(self, action: str) -> Reply:
        self._steps += 1
        command = extract_command(action)
        valid = command in self._state["admissible_commands"]
        self._state, _, ended = self._world.step(command)
        won = bool(self._state["won"])
        done = bool(ended) or won or self._steps >= self.max_steps
        return Reply(self._show(), float(won), done=done, valid=valid, success=won if done else None)

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def _choose_game(self, seed: int) -> Path:
        """Return the next solvable game after the seed's; the files are large, so only as few as needed are read."""
        for number in range(seed, seed + len(self._games)):
            game = self._games[number % len(self._games)]
            if json.loads(game.read_text(encoding="utf-8")).get("solvable"):
                return game
        raise EnvironmentFailed(f"no game below {self._folder} is marked solvable")

    def _show(self) -> str:
        text = str(self._state["feedback"]).strip()
        if not self._list_actions:
            return text
        return f"{text}\n\nPossible actions: {', '.join(sorted(self._state['admissible_commands']))}"


@lru_cache(maxsize=8)
def _find_games(folder: str, split: str) -> tuple[Path, ...]:
    """Return the game files of a split, without those that the original excludes: movable and sliced things."""
    paths = Path(folder).glob(f"json_*/{split}/**/game.tw-pddl")
    return tuple(sorted(path for path in paths if "movable" not in str(path) and "Sliced" not in str(path)))
