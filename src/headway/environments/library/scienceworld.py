"""ScienceWorld: thirty science tasks in a house, such as boiling water or finding a living thing.

The reward of an episode is its final score, from 0 to 1, given out as it changes. A score below 0 counts as 0 and ends
the episode. The seed chooses a variation of the task among those of its fold. ScienceWorld itself draws some details at
random, such as which paint is in a cup; the seed does not control them. Needs Java, and about half a GB of memory for
each environment object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.environments.optional_dependencies import close_java_world, import_optional_library, require_java
from headway.environments.response_parsing import extract_command
from headway.environments.text_environment import Reply
from headway.errors import ConfigError, EnvironmentFailed

_FOLDS = ("train", "dev", "test")
_NOT_UNDERSTOOD = ("No known action matches", "Unknown action")
_INSTRUCTIONS = """You are in a house and have a science task.
Each turn answer with one action: <answer>action</answer>. Actions are:
open OBJECT, close OBJECT, activate OBJECT, deactivate OBJECT, connect OBJECT to OBJECT, disconnect OBJECT,
use OBJECT on OBJECT, look around, look at OBJECT, look in OBJECT, read OBJECT, move OBJECT to OBJECT, pick up OBJECT,
put down OBJECT, pour OBJECT into OBJECT, dunk OBJECT into OBJECT, mix OBJECT, go to PLACE, teleport to PLACE,
eat OBJECT, flush OBJECT, focus on OBJECT, wait, wait1, task, inventory.
An answer that names several things asks you for a number: answer with it."""


class ScienceWorld:
    """`simplifications` as the library spells them, such as `easy`; `data` may name `task` and `variation`."""

    instructions = _INSTRUCTIONS
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
        if fold not in _FOLDS:
            raise ConfigError("is no fold", key="fold", value=fold, hint=f"one of {', '.join(_FOLDS)}")
        if max_steps < 1:
            raise ConfigError("must be at least 1", key="max_steps", value=max_steps)
        require_java("scienceworld")
        library = import_optional_library("scienceworld", extra="scienceworld", wanted_by="scienceworld")
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
        return Reply(
            str(text),
            reward,
            done=done,
            valid=not str(text).startswith(_NOT_UNDERSTOOD),
            success=score >= 1.0 if done else None,
            info={"score": score, "task": state["taskName"], "variation": state["variationIdx"]},
        )

    def close(self) -> None:
        close_java_world(self._world)

    def _load(self, task: str, variation: int) -> None:
        try:
            self._world.load(task, variation, self._simplifications)
        except (ValueError, KeyError) as error:
            raise EnvironmentFailed(f"ScienceWorld has no such task: {error}") from error
