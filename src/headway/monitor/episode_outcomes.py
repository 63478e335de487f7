"""Counts the outcomes of episodes in environments: success, number of turns, invalid turns.

Episodes are counted when they end (`SampleFinish`), so groups that teach nothing and are dropped count too; for
validation the numbers are those of `ValidateEnd`. A run without environments has no outcomes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.monitor.event_record import Event
from headway.monitor.events import RunBegin, SampleFinish, StepEnd, ValidateEnd
from headway.monitor.measured_window import EventHandler


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcomes:
    """Summary of several episodes."""

    trained: int
    """Version after the step during which they ended, or the version that was validated."""
    success: float | None
    """Share that solved their task; None if the environment does not report it."""
    turns: float
    """Mean number of turns."""
    invalid: float
    """Share of the turns that the environment could not parse."""

    def values(self) -> dict[str, float]:
        """Return the numbers that are known, by name."""
        found = {"turns": self.turns, "invalid": self.invalid}
        return found if self.success is None else {"success": self.success, **found}


class EpisodeOutcomeMeter:
    """Adds up episodes until they are taken out."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._episodes = self._judged = 0
        self._success = self._turns = self._invalid = 0.0

    def add(self, event: SampleFinish) -> None:
        """Count an episode that was generated for training and reports its turns."""
        if event.turns is None or event.who != "generate":
            return
        self._episodes += 1
        self._turns += event.turns
        self._invalid += event.invalid or 0.0
        if event.success is not None:
            self._judged += 1
            self._success += event.success

    def take(self, trained: int) -> EpisodeOutcomes | None:
        """Return the summary since the last call, or None without episodes."""
        if not self._episodes:
            return None
        success = self._success / self._judged if self._judged else None
        turns, invalid = self._turns / self._episodes, self._invalid / max(1.0, self._turns)
        found = EpisodeOutcomes(trained=trained, success=success, turns=turns, invalid=invalid)
        self.clear()
        return found


def make_validation_outcomes(event: ValidateEnd) -> EpisodeOutcomes | None:
    """Return the outcomes of a validation, or None if it did not play in environments."""
    if event.turns is None:
        return None
    invalid = event.invalid or 0.0
    return EpisodeOutcomes(trained=event.trained, success=event.success, turns=event.turns, invalid=invalid)


class EpisodeRecorder:
    """Keeps the outcomes of every step and every validation."""

    def __init__(self) -> None:
        self.steps: list[EpisodeOutcomes] = []
        self.validations: list[EpisodeOutcomes] = []
        self._meter = EpisodeOutcomeMeter()
        self.handlers: Mapping[type[Event], EventHandler] = {
            RunBegin: lambda time_s, event: self._meter.clear(),
            SampleFinish: lambda time_s, event: self._meter.add(event),
            StepEnd: self._end_step,
            ValidateEnd: self._end_validation,
        }

    def _end_step(self, time_s: float, event: StepEnd) -> None:
        found = self._meter.take(event.trained)
        if found is not None:
            self.steps.append(found)

    def _end_validation(self, time_s: float, event: ValidateEnd) -> None:
        found = make_validation_outcomes(event)
        if found is not None:
            self.validations.append(found)
