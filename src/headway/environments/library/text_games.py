"""Text games of other projects: TextWorldExpress, ScienceWorld and ALFWorld.

TextWorldExpress has eight families of games, such as cooking from a recipe or finding a coin. The reward is the change
of the game's score, which is 1 when the task is done. A seed is an index into the games of its fold, which repeat after
a thousand. Needs Java, and about 100 MB of memory for each environment object.

ScienceWorld has thirty science tasks in a house, such as boiling water. The reward of an episode is its final score,
from 0 to 1, given out as it changes. A score below 0 counts as 0 and ends the episode. The seed chooses a variation of
the task among those of its fold; some details, such as which paint is in a cup, are random in the library itself. Needs
Java, and about half a GB of memory for each environment object.

ALFWorld has household tasks. Its data (`alfworld-download`) is not part of any package: the option `data_path`, or
`ALFWORLD_DATA`, names its folder. The seed chooses a game of the split, among those marked solvable. The reward is 1
for the action that solves it. The adapter was written to the interfaces of ALFWorld 0.4 and TextWorld 1.7 and tested
only against a stand-in for them, not against the games themselves.

The library starts one Java process per environment object. The process exits when its standard input closes, so it does
not outlive this process.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from headway.environments.response_parsing import extract_command
from headway.environments.text_environment import Reply
from headway.errors import ConfigError, EnvironmentFailed
from headway.extras import import_optional

GAMES = ("arithmetic", "coin", "cookingworld", "mapreader", "peckingorder", "simonsays", "sorting", "twc")
_FOLDS = ("train", "dev", "test")
_ALFWORLD_SPLITS = ("train", "valid_seen", "valid_unseen")
_NOT_UNDERSTOOD = ("No known action matches", "Unknown action")
_JAVA_EXIT_TIMEOUT_S = 5.0
_SCIENCEWORLD_INSTRUCTIONS = """You are in a house and have a science task.
Each turn answer with one action: <answer>action</answer>. Actions are:
open OBJECT, close OBJECT, activate OBJECT, deactivate OBJECT, connect OBJECT to OBJECT, disconnect OBJECT,
use OBJECT on OBJECT, look around, look at OBJECT, look in OBJECT, read OBJECT, move OBJECT to OBJECT, pick up OBJECT,
put down OBJECT, pour OBJECT into OBJECT, dunk OBJECT into OBJECT, mix OBJECT, go to PLACE, teleport to PLACE,
eat OBJECT, flush OBJECT, focus on OBJECT, wait, wait1, task, inventory.
An answer that names several things asks you for a number: answer with it."""


class TextWorldExpress:
    """`game_params` as the library spells them, such as `numLocations=3,includeDoors=0`; `data` may override both."""

    instructions = """You are playing a text game. Each turn answer with one action: <answer>action</answer>.
The actions that are possible now are listed after what you see."""
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
        _check_choice("game", game, GAMES)
        _check_java_options("textworld", fold, max_steps)
        self.max_steps, self.concurrency = max_steps, concurrency
        self.workers = concurrency  # a call into Java that hangs can only be killed
        self._game, self._params, self._fold, self._list_actions = game, game_params, fold, list_actions
        library = import_optional("textworld_express", extra="textworld", key="env_type", value="textworld")
        self._world = library.TextWorldExpressEnv(envStepLimit=max_steps)
        self._fold_seeds: list[int] = []

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        game, params = str(data.get("game", self._game)), str(data.get("game_params", self._params))
        try:
            self._game_seed = self._find_game_seed(game, params, seed)
            names = {"gameFold": self._fold, "gameName": game, "gameParams": params}
            _, self._state = self._world.reset(seed=self._game_seed, **names)
        except ValueError as error:
            raise EnvironmentFailed(f"TextWorldExpress has no {game} with {params!r}: {error}") from error
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

    def _find_game_seed(self, game: str, params: str, seed: int) -> int:
        """Return the library's seed for one of ours. The seeds of a fold are known once a game is loaded."""
        if not self._fold_seeds:
            self._world.load(game, params)
            self._fold_seeds = list(getattr(self._world, f"getValidSeeds{self._fold.title()}")())
        return self._fold_seeds[seed % len(self._fold_seeds)]

    def _show(self) -> str:
        return _format_state(self._state["observation"], self._state["validActions"] if self._list_actions else None)


class ScienceWorld:
    """`simplifications` as the library spells them, such as `easy`; `data` may name `task` and `variation`."""

    instructions = _SCIENCEWORLD_INSTRUCTIONS
    reusable = True

    def __init__(
        self,
        *,
        task: str = "find-living-thing",
        simplifications: str = "easy",
        fold: str = "train",
        max_steps: int = 50,
        concurrency: int = 4,
    ) -> None:
        _check_java_options("scienceworld", fold, max_steps)
        library = import_optional("scienceworld", extra="scienceworld", key="env_type", value="scienceworld")
        self.max_steps, self.concurrency = max_steps, concurrency
        self.workers = concurrency  # a call into Java that hangs can only be killed
        self._task, self._simplifications, self._fold = task, simplifications, fold
        self._world = library.ScienceWorldEnv("", envStepLimit=max_steps)
        try:
            self._load(task, 0)
        except EnvironmentFailed as error:
            close_java_world(self._world)
            raise ConfigError(str(error), key="task", value=task) from error

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        task = str(data.get("task", self._task))
        if task != self._task:
            self._load(task, 0)  # the variations of a task are known only once it is loaded
        variation = data.get("variation")
        if variation is None:
            variations = list(getattr(self._world, f"get_variations_{self._fold}")())
            variation = variations[seed % len(variations)]
        self._load(task, int(variation))
        text, state = self._world.reset()
        self._steps, self._score = 0, 0.0
        return f"{state['taskDesc']}\n\n{text}"

    def step(self, action: str) -> Reply:
        self._steps += 1
        text, _, ended, state = self._world.step(extract_command(action))
        score = max(state["score"], 0) / 100
        reward, self._score = score - self._score, score
        done = bool(ended) or score >= 1.0 or self._steps >= self.max_steps
        info = {"score": score, "task": state["taskName"], "variation": state["variationIdx"]}
        valid, success = not str(text).startswith(_NOT_UNDERSTOOD), score >= 1.0 if done else None
        return Reply(str(text), reward, done=done, valid=valid, success=success, info=info)

    def close(self) -> None:
        close_java_world(self._world)

    def _load(self, task: str, variation: int) -> None:
        try:
            self._world.load(task, variation, self._simplifications)
        except (ValueError, KeyError) as error:
            raise EnvironmentFailed(f"ScienceWorld has no such task: {error}") from error


class ALFWorld:
    """Plays one game per episode; `data` may hold `game`, the path of a game file below the data folder."""

    instructions = """You are in a house and have a task. Each turn answer with one action: <answer>action</answer>.
The actions that are possible now are listed after what you see."""
    reusable = True

    def __init__(
        self, *, data_path: str = "", split: str = "train", max_steps: int = 50, list_actions: bool = True
    ) -> None:
        _check_choice("split", split, _ALFWORLD_SPLITS)
        folder = data_path or os.environ.get("ALFWORLD_DATA", "")
        self._textworld = import_optional("textworld", extra="alfworld", key="env_type", value="alfworld")
        module = "alfworld.agents.environment.alfred_tw_env"
        self._wrappers = import_optional(module, extra="alfworld", key="env_type", value="alfworld")
        self._folder = Path(folder).expanduser()
        self._games = _find_alfworld_games(str(self._folder), split) if folder else ()
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
        actions = self._state["admissible_commands"] if self._list_actions else None
        return _format_state(self._state["feedback"], actions)


@lru_cache(maxsize=8)
def _find_alfworld_games(folder: str, split: str) -> tuple[Path, ...]:
    """Return the game files of a split, without those that the original excludes: movable and sliced things."""
    paths = Path(folder).glob(f"json_*/{split}/**/game.tw-pddl")
    return tuple(sorted(path for path in paths if "movable" not in str(path) and "Sliced" not in str(path)))


def _format_state(text: Any, actions: Iterable[str] | None) -> str:
    listed = "" if actions is None else f"\n\nPossible actions: {', '.join(sorted(actions))}"
    return f"{str(text).strip()}{listed}"


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"is no {key}", key=key, value=value, hint=f"one of {', '.join(choices)}")


def _check_java_options(name: str, fold: str, max_steps: int) -> None:
    """Check the options that both Java environments have, and that Java is installed. Raises `ConfigError`."""
    _check_choice("fold", fold, _FOLDS)
    if max_steps < 1:
        raise ConfigError("must be at least 1", key="max_steps", value=max_steps)
    if shutil.which("java") is None:
        raise ConfigError("needs Java", key="env_type", value=name, hint="apt install default-jre-headless")


def close_java_world(world: Any) -> None:
    """Close an environment of TextWorldExpress or ScienceWorld and wait until its Java process has exited."""
    process = world._gateway.java_process
    with suppress(Exception):  # the gateway raises if the process has died or hangs
        world.close()
    try:
        process.wait(_JAVA_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
