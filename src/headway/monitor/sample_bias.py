"""Compares what a run trained with what it started: mean length and mean reward, step by step.

The scheduler measures these numbers (`flow/sample_population.py` says how) and reports them with every step. A policy
that drops stragglers trains shorter answers than the model gives; this is where a user sees it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.monitor.event_record import Event
from headway.monitor.events import StepEnd
from headway.monitor.measured_window import EventHandler

BIAS_PREFIXES = ("length/", "reward/", "bias/")
"""Beginnings of the names of these numbers in `StepEnd.metrics`."""
BIAS_TOLERANCE = 0.02
"""Difference between trained and started that is worth a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasSummary:
    """Means over the steps of a run; None where nothing was counted."""

    length_started: float | None
    """Mean length of all samples that were to be trained, dropped ones included."""
    length_dropped: float | None
    """Mean length of dropped samples when they were dropped."""
    length_trained: float | None
    reward_started: float | None
    reward_dropped: float | None
    reward_trained: float | None
    length_bias: float
    """Trained against started, as a share, over the whole run."""
    reward_bias: float

    def describe(self) -> str:
        """Return one sentence if training saw something else than rollout made, else an empty text."""
        found = []
        if abs(self.length_bias) > BIAS_TOLERANCE:
            found.append(f"{abs(self.length_bias):.1%} {'longer' if self.length_bias > 0 else 'shorter'}")
        if abs(self.reward_bias) > BIAS_TOLERANCE:
            found.append(f"{abs(self.reward_bias):.1%} {'better' if self.reward_bias > 0 else 'worse'} rewarded")
        return f"trained samples are {' and '.join(found)} than the samples that were started" if found else ""


class BiasRecorder:
    """Accumulates the numbers of every step."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self.handlers: Mapping[type[Event], EventHandler] = {StepEnd: self._end_step}

    def _end_step(self, time_s: float, event: StepEnd) -> None:
        for name, value in event.metrics.items():
            if name.startswith(BIAS_PREFIXES):
                self._values.setdefault(name, []).append(value)

    def bias(self) -> BiasSummary | None:
        """Return what is known so far; None before the first step."""
        if "bias/length" not in self._values:
            return None
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        length_bias, reward_bias = (self._values.get(f"bias/{name}", [0.0])[-1] for name in ("length", "reward"))
        trained = means.get("length/trained")
        return BiasSummary(
            length_started=None if trained is None else trained / (1 + length_bias),
            length_dropped=means.get("length/dropped"),
            length_trained=trained,
            reward_started=means.get("reward/started"),
            reward_dropped=means.get("reward/dropped"),
            reward_trained=means.get("reward/trained"),
            length_bias=length_bias,
            reward_bias=reward_bias,
        )
