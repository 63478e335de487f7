"""Turns events into series of numbers: the one place that decides what a curve is called and what it means.

docs/monitoring.md has the table of all names. The step of a point is the trained version. Numbers are neither smoothed
nor filtered: a NaN comes through as one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

from headway.monitor import events
from headway.monitor.episode_outcomes import EpisodeOutcomeMeter, make_validation_outcomes
from headway.monitor.event_log import LoggedEvent
from headway.monitor.event_record import Event
from headway.monitor.sample_bias import BIAS_PREFIXES
from headway.monitor.sample_lag import VersionTracker

HELD_OUT_REWARD = "reward/held_out"
MIXED_HELD_OUT_REWARD = "reward/held_out_mixed"
"""Held-out reward whose answers may be of several versions."""
_EQUAL_REWARDS_REASON = "zero_variance"
_TRUNCATED_FINISH = "length"
_METRIC_PREFIXES = ("train/", *BIAS_PREFIXES)


_VERSION_EVENTS = (events.WeightsServed, events.BackendUp, events.BackendDown, events.EngineLeave)


class ScalarPoint(NamedTuple):
    """The numbers of one step."""

    step: int
    time_s: float
    values: dict[str, float]
    rewind: bool = False
    """Earlier points of this step and later ones are void: those steps were lost and are made again."""

    @property
    def is_held_out(self) -> bool:
        """Whether the numbers are those of a validation."""
        return next(iter(self.values), "").startswith(("held_out/", HELD_OUT_REWARD))  # all names are, or none


class ScalarMeter:
    """Turns events into points, one call per event. Events that no curve needs cost one look-up."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._begun_s: float | None = None
        self._last_step = -1
        self._drops: Counter[str] = Counter()
        self._episodes = EpisodeOutcomeMeter()
        self._reset_counts()
        self._versions, self._behind_s, self._behind_since_s = VersionTracker(), 0.0, 0.0
        follow = dict.fromkeys(_VERSION_EVENTS, self._follow_versions)
        self._handlers: dict[type[Event], Callable[[float, Any], ScalarPoint | None]] = {
            **follow,
            events.RunBegin: self._begin_run,
            events.RunReady: self._begin_steps,
            events.RequestEnd: self._end_request,
            events.GroupReady: self._make_group_ready,
            events.GroupDrop: self._drop_group,
            events.SampleEnd: self._end_sample,
            events.StepBegin: self._begin_step,
            events.GroupTrain: self._train_group,
            events.StepEnd: self._end_step,
            events.SampleFinish: lambda time_s, event: self._episodes.add(event),
            events.ValidateEnd: self._end_validation,
            events.ResourceUsage: self._note_usage,
        }

    @property
    def versions(self) -> VersionTracker:
        """Trained and served versions of the moment."""
        return self._versions

    def save_state(self) -> dict[str, Any]:
        """Return, as JSON values, what a meter needs that goes on right after the end of a step."""
        return {
            "step_s": self._step_s,
            "last_step": self._last_step,
            "drops": list(self._drops),
            "behind_since_s": self._behind_since_s,
            "versions": self._versions.save_state(),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "ScalarMeter":
        """Make a meter that goes on from a state that `save_state` returned."""
        meter = ScalarMeter()
        meter._step_s, meter._last_step = state["step_s"], int(state["last_step"])
        meter._drops = Counter(dict.fromkeys(state["drops"], 0))
        meter._behind_since_s = float(state["behind_since_s"])
        meter._versions.load_state(state["versions"])
        return meter

    def _reset_counts(self) -> None:
        """Start to count for the next step."""
        self._generated = self._requests = self._truncated = self._ready = self._equal = 0
        self._samples = self._actions = self._lag = self._lag_max = 0
        self._episodes.clear()
        self._usage: dict[str, list[float]] = {}
        self._drops = Counter(dict.fromkeys(self._drops, 0))

    def __call__(self, logged: LoggedEvent) -> ScalarPoint | None:
        time_s, event = logged
        if self._step_s is None:
            self._step_s = time_s
        handler = self._handlers.get(type(event))
        return handler(time_s, event) if handler else None

    def _begin_run(self, time_s: float, event: events.RunBegin) -> ScalarPoint:
        """Void every point that the new process does not go on from; it cannot know what the one before it wrote."""
        self._reset_counts()
        self._follow_versions(time_s, event)
        self._step_s, self._begun_s, self._behind_s = time_s, None, 0.0
        first = event.trained + 1 if event.resumed else 0
        self._last_step = first - 1
        return ScalarPoint(first, time_s, {}, rewind=True)

    def _begin_steps(self, time_s: float, event: events.RunReady) -> None:
        self._step_s = time_s

    def _end_request(self, time_s: float, event: events.RequestEnd) -> None:
        self._generated += event.actions
        self._requests += 1
        self._truncated += event.finish == _TRUNCATED_FINISH

    def _make_group_ready(self, time_s: float, event: events.GroupReady) -> None:
        self._ready += not event.equal
        self._equal += bool(event.equal)

    def _drop_group(self, time_s: float, event: events.GroupDrop) -> None:
        self._equal += event.reason == _EQUAL_REWARDS_REASON

    def _end_sample(self, time_s: float, event: events.SampleEnd) -> None:
        if event.end == "dropped":
            self._drops[event.reason or "unknown"] += 1

    def _begin_step(self, time_s: float, event: events.StepBegin) -> None:
        self._follow_versions(time_s, event)
        self._begun_s = time_s
        self._samples = self._actions = self._lag = self._lag_max = 0

    def _train_group(self, time_s: float, event: events.GroupTrain) -> None:
        lag = event.trained - event.oldest
        self._samples += event.samples
        self._actions += event.actions
        self._lag += event.samples * lag
        self._lag_max = max(self._lag_max, lag)

    def _follow_versions(self, time_s: float, event: Event) -> None:
        """Follow trained and served versions, and add up how far apart they were."""
        self._behind_s += self._versions.behind * (time_s - self._behind_since_s)
        self._behind_since_s = time_s
        self._versions.observe(event)

    def _note_usage(self, time_s: float, event: events.ResourceUsage) -> None:
        for name, value in event.values.items():
            self._usage.setdefault(name, []).append(value)

    def _end_step(self, time_s: float, event: events.StepEnd) -> ScalarPoint:
        step, before_s = event.trained, self._step_s if self._step_s is not None else time_s
        values: dict[str, float] = {}
        if _is_number(event.reward):
            values["reward/train"] = event.reward
        values["time/step_s"] = spent_s = time_s - before_s
        if self._begun_s is not None:
            values["time/train_s"] = time_s - self._begun_s
            values["time/wait_s"] = max(0.0, self._begun_s - before_s)
            values |= self._training_values(spent_s)
        values |= self._generation_values(spent_s)
        values |= {name: sum(found) / len(found) for name, found in self._usage.items()}
        self._follow_versions(time_s, event)
        if self._versions.served is not None and spent_s:
            values["lag/served_behind"] = self._behind_s / spent_s
        self._behind_s = 0.0
        counts = {"groups/replaced": event.replaced, "groups/filled": event.filled}
        values |= {name: count for name, count in counts.items() if count is not None}
        metrics = event.metrics.items()
        values |= {name: value for name, value in metrics if name.startswith(_METRIC_PREFIXES) and _is_number(value)}
        possible_tflop = values.get("train/peak_tflops", 0.0) * values.get("time/train_s", 0.0)
        if possible_tflop and "train/tflop" in values:
            values["throughput/mfu"] = values["train/tflop"] / possible_tflop
        outcomes = self._episodes.take(step)
        if outcomes is not None:
            values |= {f"episode/{name}": value for name, value in outcomes.values().items()}
        rewind, self._last_step = step <= self._last_step, step
        self._step_s, self._begun_s = time_s, None
        self._reset_counts()
        return ScalarPoint(step, time_s, values, rewind)

    def _training_values(self, spent_s: float) -> dict[str, float]:
        if not self._samples:
            return {}
        values = {"lag/mean": self._lag / self._samples, "lag/max": self._lag_max}
        values["response/length"] = self._actions / self._samples
        if spent_s:
            values["throughput/samples_per_s"] = self._samples / spent_s
            values["throughput/tokens_per_s"] = self._actions / spent_s
        return values

    def _generation_values(self, spent_s: float) -> dict[str, float]:
        values: dict[str, float] = {f"drops/{reason}": count for reason, count in self._drops.items()}
        if self._requests:
            values["response/truncated"] = self._truncated / self._requests
            if spent_s:
                values["throughput/generated_tokens_per_s"] = self._generated / spent_s
        if self._ready + self._equal:
            values["groups/with_spread"] = self._ready / (self._ready + self._equal)
        return values

    def _end_validation(self, time_s: float, event: events.ValidateEnd) -> ScalarPoint | None:
        if self._last_step < 0:  # the first validation comes before the first step, and is not part of it
            self._step_s = time_s
        values: dict[str, float] = {}
        if _is_number(event.reward) and (event.samples or not event.failed):
            values[MIXED_HELD_OUT_REWARD if event.mixed else HELD_OUT_REWARD] = event.reward
        if event.failed:
            values["held_out/failed"] = event.failed / (event.samples + event.failed)
        outcomes = make_validation_outcomes(event)
        if outcomes is not None:
            values |= {f"held_out/{name}": value for name, value in outcomes.values().items()}
        return ScalarPoint(event.trained, time_s, values) if values else None


def compute_scalars(logged_events: Iterable[LoggedEvent]) -> Iterator[ScalarPoint]:
    """Yield the points of a recorded run, in the order they happened."""
    meter = ScalarMeter()
    for logged in logged_events:
        point = meter(logged)
        if point is not None:
            yield point


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
