"""TextWorldExpress: eight families of text games, such as cooking from a recipe or finding a coin.

The reward is the change of the game's score, which ends at 1 where the task is done. The same seed is the same game: a
seed is a number in the games of its fold (`train`, `dev`, `test`), which repeat after a thousand. Needs Java; about 100
MB of memory for each environment object.
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
        self._game, self._params, self._fold, self._list = game, game_params, fold, list_actions
        self._world = import_optional_library(
            "textworld_express", extra="textworld", wanted_by="textworld"
        ).TextWorldExpressEnv(envStepLimit=max_steps)
        self._seeds: dict[str, list[int]] = {}

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        game, params = str(data.get("game", self._game)), str(data.get("game_params", self._params))
        self._seed_of = self._number(game, params, seed)
        try:
            _, self._now = self._world.reset(seed=self._seed_of, gameFold=self._fold, gameName=game, gameParams=params)
        except ValueError as error:
            raise EnvironmentFailed(f"TextWorldExpress has no {game} with {params!r}: {error}") from error
        self._steps = 0
        return f"Task: {self._now['taskDescription']}\n\n{self._shown()}"

    def step(self, action: str) -> Reply:
        self._steps += 1
        command = extract_command(action).lower()
        known = command in self._now["validActions"]
        _, reward, _, now = self._world.step(command)
        self._now = now
        done = now["tasksuccess"] or now["taskfailure"] or now["score"] >= 1.0 or self._steps >= self.max_steps
        success = bool(now["tasksuccess"] or now["score"] >= 1.0) if done else None
        info = {"score": now["score"], "game_seed": self._seed_of}
        return Reply(self._shown(), float(reward), done=bool(done), valid=known, success=success, info=info)

    def close(self) -> None:
        close_java_world(self._world)

    def gold(self, seed: int) -> list[str]:
        """A way to the end of a game, for checks and demonstrations. Begins that game."""
        seed = self._number(self._game, self._params, seed)
        self._world.reset(
            seed=seed, gameFold=self._fold, gameName=self._game, gameParams=self._params, generateGoldPath=True
        )
        return list(self._world.getGoldActionSequence())

    def _number(self, game: str, params: str, seed: int) -> int:
        """Which of the fold's seeds one of ours is. They are known once a game is loaded."""
        if self._fold not in self._seeds:
            try:
                self._world.load(game, params)
            except ValueError as error:
                raise EnvironmentFailed(f"TextWorldExpress has no {game} with {params!r}: {error}") from error
            self._seeds[self._fold] = list(getattr(self._world, f"getValidSeeds{self._fold.title()}")())
        seeds = self._seeds[self._fold]
        return seeds[seed % len(seeds)]

    def _shown(self) -> str:
        text = str(self._now["observation"]).strip()
        if not self._list:
            return text
        return f"{text}\n\nPossible actions: {', '.join(sorted(self._now['validActions']))}"
