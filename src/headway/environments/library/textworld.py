"""TextWorldExpress: eight families of text games, such as cooking from a recipe or finding a coin.

The reward is the change of the game's score, which is 1 when the task is done. The same seed gives the same game: a
seed is an index into the games of its fold (`train`, `dev`, `test`), which repeat after a thousand. Needs Java, and
about 100 MB of memory for each environment object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.environments.optional_dependencies import close_java_world, import_optional_library, require_java
from headway.environments.response_parsing import extract_command
from headway.environments.text_environment import Reply
from headway.errors import ConfigError, EnvironmentFailed

GAMES = ("arithmetic", "coin", "cookingworld", "mapreader", "peckingorder", "simonsays", "sorting", "twc")
_FOLDS = ("train", "dev", "test")
_INSTRUCTIONS = """You are playing a text game. Each turn answer with one action: <answer>action</answer>.
The actions that are possible now are listed after what you see."""


class TextWorldExpress:
    """`game_params` as the library spells them, such as `numLocations=3,includeDoors=0`; `data` may override both."""

    instructions = _INSTRUCTIONS
    reusable = True

    def __init__(
        self,
        *,
        game: str = "coin",
        game_params: str = "",
        fold: str = "train",
        max_steps: int = 50,
        list_actions: bool = True,
        concurrency: int = 8,
    ) -> None:
        if game not in GAMES:
            raise ConfigError("is no game", key="game", value=game, hint=f"one of {', '.join(GAMES)}")
        if fold not in _FOLDS:
            raise ConfigError("is no fold", key="fold", value=fold, hint=f"one of {', '.join(_FOLDS)}")
        if max_steps < 1:
            raise ConfigError("must be at least 1", key="max_steps", value=max_steps)
        require_java("textworld")
        self.max_steps, self.concurrency = max_steps, concurrency
        self.workers = concurrency  # a call into Java that hangs can only be killed
        self._game, self._params, self._fold, self._list_actions = game, game_params, fold, list_actions
        library = import_optional_library("textworld_express", extra="textworld", wanted_by="textworld")
        self._world = library.TextWorldExpressEnv(envStepLimit=max_steps)
        self._fold_seeds: list[int] = []

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        game, params = str(data.get("game", self._game)), str(data.get("game_params", self._params))
        self._game_seed = self._find_game_seed(game, params, seed)
        try:
            _, self._state = self._world.reset(
                seed=self._game_seed, gameFold=self._fold, gameName=game, gameParams=params
            )
        except ValueError as error:
            raise _unknown_game(game, params, error) from error
        self._steps = 0
        return f"Task: {self._state['taskDescription']}\n\n{self._show()}"

    def step(self, action: str) -> Reply:
        self._steps += 1
        command = extract_command(action).lower()
        valid = command in self._state["validActions"]
        _, reward, _, self._state = self._world.step(command)
        state = self._state
        won = bool(state["tasksuccess"] or state["score"] >= 1.0)
        done = bool(won or state["taskfailure"] or self._steps >= self.max_steps)
        info = {"score": state["score"], "game_seed": self._game_seed}
        return Reply(self._show(), float(reward), done=done, valid=valid, success=won if done else None, info=info)

    def close(self) -> None:
        close_java_world(self._world)

    def find_solution(self, seed: int) -> list[str]:
        """Start a game and return actions that solve it, for checks and demonstrations."""
        game_seed = self._find_game_seed(self._game, self._params, seed)
        self._world.reset(
            seed=game_seed, gameFold=self._fold, gameName=self._game, gameParams=self._params, generateGoldPath=True
        )
        return list(self._world.getGoldActionSequence())

    def _find_game_seed(self, game: str, params: str, seed: int) -> int:
        """Return the library's seed for one of ours. The seeds of a fold are known once a game is loaded."""
        if not self._fold_seeds:
            try:
                self._world.load(game, params)
            except ValueError as error:
                raise _unknown_game(game, params, error) from error
            self._fold_seeds = list(getattr(self._world, f"getValidSeeds{self._fold.title()}")())
        return self._fold_seeds[seed % len(self._fold_seeds)]

    def _show(self) -> str:
        text = str(self._state["observation"]).strip()
        if not self._list_actions:
            return text
        return f"{text}\n\nPossible actions: {', '.join(sorted(self._state['validActions']))}"


def _unknown_game(game: str, params: str, error: ValueError) -> EnvironmentFailed:
    return EnvironmentFailed(f"TextWorldExpress has no {game} with {params!r}: {error}")
