"""What became of episodes in environments: how many succeeded, how long they were, what was not understood.

Counted where an episode ends (`sample.finish`), so that groups which teach nothing and are dropped count too; of
validation, what `validate.end` reports. A run without environments has nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.monitor.event_log import LoggedEvent
from headway.monitor.measured_window import EventHandler


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcomes:
    """Of several episodes."""

    trained: int
    """The policy: after the step that ended with them, or the one that was judged."""
    success: float | None
    """Share that solved their task; `None`: they did not say."""
    turns: float
    """Mean."""
    invalid: float
    """Share of the turns that were not understood."""

    def values(self) -> dict[str, float]:
        """By name, without what is not known."""
        found = {"turns": self.turns, "invalid": self.invalid}
        return found if self.success is None else {"success": self.success, **found}


class EpisodeOutcomeMeter:
    """Adds up episodes until they are taken out."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing was counted."""
        self._episodes = self._judged = 0
        self._success = self._turns = self._invalid = 0.0

    def add(self, data: Mapping[str, Any]) -> None:
        """One episode, as its event tells of it."""
        turns = data.get("turns")
        if turns is None:
            return
        self._episodes += 1
        self._turns += turns
        self._invalid += data.get("invalid", 0.0)
        if "success" in data:
            self._judged += 1
            self._success += data["success"]

    def take(self, trained: int) -> EpisodeOutcomes | None:
        """What came together since the last time."""
        if not self._episodes:
            return None
        found = EpisodeOutcomes(
            trained=trained,
            success=self._success / self._judged if self._judged else None,
            turns=self._turns / self._episodes,
            invalid=self._invalid / max(1.0, self._turns),
        )
        self.clear()
        return found


def make_validation_outcomes(data: Mapping[str, Any]) -> EpisodeOutcomes | None:
    """Of a validation, from its event."""
    if data.get("turns") is None:
        return None
    success, invalid = data.get("success"), data.get("invalid", 0.0)
    return EpisodeOutcomes(trained=data["trained"], success=success, turns=data["turns"], invalid=invalid)


class EpisodeRecorder:
    """Outcomes by step, and of the validations."""

    def __init__(self) -> None:
        self.steps: list[EpisodeOutcomes] = []
        self.validations: list[EpisodeOutcomes] = []
        self._meter = EpisodeOutcomeMeter()
        self.handlers: Mapping[str, EventHandler] = {
            "run.begin": self._run_begin,
            "sample.finish": self._finish,
            "step.end": self._step_end,
            "validate.end": self._validated,
        }

    def _run_begin(self, event: LoggedEvent) -> None:
        self._meter.clear()

    def _finish(self, event: LoggedEvent) -> None:
        if event.who == "generate":
            self._meter.add(event.data)

    def _step_end(self, event: LoggedEvent) -> None:
        found = self._meter.take(event.data["trained"])
        if found is not None:
            self.steps.append(found)

    def _validated(self, event: LoggedEvent) -> None:
        found = make_validation_outcomes(event.data)
        if found is not None:
            self.validations.append(found)
