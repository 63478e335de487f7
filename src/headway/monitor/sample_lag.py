"""Measures how far off-policy a run is: the lag of trained samples, served behind trained, and the drops.

The lag of a sample is `trained − oldest` at the moment of training, never measured against `served`. It has two parts:
versions that passed while the sample was generated (in flight) and while it waited to be trained on (in queue).
Histograms count samples, not groups, and cover the whole run, because the bound is a promise about every sample.

`behind` is how many versions the slowest live engine serves behind the trainer, weighted by time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.monitor import events
from headway.monitor.event_record import Event
from headway.monitor.measured_window import EventHandler, WindowClock

VALIDATION_ROLE = "validate"
"""Role that starts samples for validation only: they are never trained on and are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagBin:
    """Samples that had this lag; each column adds up to the samples trained."""

    lag: int
    samples: int
    """Samples whose whole lag was `lag` versions."""
    in_flight: int
    """Samples that got `lag` versions older while they were generated."""
    in_queue: int
    """Samples that got `lag` versions older while they waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagSummary:
    """Lag of a whole run."""

    histogram: tuple[LagBin, ...]
    """One bin for every lag from 0 to the largest, gaps included."""
    samples: int
    """Samples trained, in the whole run."""
    max: int
    """Largest lag of any sample, in the whole run."""
    mean: float
    mean_in_flight: float
    mean_in_queue: float
    behind_max: int
    """Most versions the slowest engine was behind the trainer, in the whole run."""
    behind_mean: float
    """Time-weighted, in the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEndCounts:
    """Numbers of samples of the whole run by how they ended."""

    started: int
    finished: int
    trained: int
    dropped: int
    saved: int
    drops: Mapping[str, int]
    """Dropped samples by reason, most frequent first."""

    @property
    def drop_share(self) -> float:
        """Dropped samples as a share of all that ended."""
        ended = self.trained + self.dropped + self.saved
        return self.dropped / ended if ended else 0.0


class VersionTracker:
    """Follows the trained version and the oldest version that any live engine serves.

    An engine that works without having reported a version counts as serving what the slowest other one does, and
    before any engine has reported as serving what the trainer started from.
    """

    __slots__ = ("_engine_counts", "_engines", "served", "trained")

    def __init__(self) -> None:
        self.trained: int | None = None
        self.served: int | None = None
        self._engines: dict[str, int] = {}
        # Engines by version: the minimum is over the few versions in service, not over thousands of engines.
        self._engine_counts: Counter[int] = Counter()

    @property
    def behind(self) -> int:
        """Versions between the trainer and the slowest engine."""
        if self.trained is None or self.served is None:
            return 0
        return max(0, self.trained - self.served)

    def save_state(self) -> dict[str, Any]:
        """Return all that is known, as JSON values."""
        return {"trained": self.trained, "served": self.served, "engines": dict(self._engines)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `save_state` returned."""
        self._engines = {str(engine): int(version) for engine, version in state["engines"].items()}
        self._engine_counts = Counter(self._engines.values())
        self.trained, self.served = state["trained"], state["served"]

    def observe(self, event: Event) -> bool:
        """Follow an event; return whether it was about versions."""
        match event:
            case events.BackendUp(who="trainer") | events.BackendDown(who="trainer"):
                return False
            case events.WeightsServed(who=engine, version=version):
                if self.trained is None and event.trained is not None:
                    self.set_trained(event.trained)
                self.set_served(engine, version)
            case events.BackendUp(who=engine, version=int(version)):
                self.set_served(engine, version)
            case events.StepBegin():
                self.set_trained(event.trained)
            case events.StepEnd():
                if self.trained is None:
                    self.set_trained(event.trained - 1)
                self.set_trained(event.trained)
            case events.BackendDown() | events.EngineLeave():
                self.remove_engine(event.who)
            case events.RunBegin():  # a new process, whose engines report what they serve
                self._engines.clear()
                self._engine_counts.clear()
            case _:
                return False
        return True

    def set_trained(self, trained: int) -> None:
        """Record that the trainer holds this version."""
        if self.trained is None:
            self.served = min(self._engine_counts, default=trained)
        self.trained = trained

    def add_engine(self, engine: str) -> None:
        """Record that an engine works, which may not have reported a version."""
        if engine not in self._engines:
            self.set_served(engine, self.served or 0)

    def set_served(self, engine: str, version: int) -> None:
        """Record that an engine serves this version from now on."""
        self._forget(engine)
        self._engines[engine] = version
        self._engine_counts[version] += 1
        self.served = min(self._engine_counts)

    def remove_engine(self, engine: str) -> None:
        """Record that an engine is down, so that nobody waits for its version."""
        self._forget(engine)
        self.served = min(self._engine_counts, default=self.served)

    def _forget(self, engine: str) -> None:
        version = self._engines.pop(engine, None)
        if version is None:
            return
        if self._engine_counts[version] > 1:
            self._engine_counts[version] -= 1
        else:
            del self._engine_counts[version]


class LagRecorder:
    """Accumulates lag from trained groups, versions and the ends of samples."""

    def __init__(self, clock: WindowClock) -> None:
        self._clock = clock
        self.versions = VersionTracker()
        self._lags: Counter[int] = Counter()
        self._in_flight: Counter[int] = Counter()
        self._in_queue: Counter[int] = Counter()
        self._sums_at_start = (0, 0, 0, 0)
        self._behind_s = self._behind_since_s = self._behind_at_start_s = self._behind_at_end_s = 0.0
        self._behind_max = 0
        self._started = self._finished = 0
        self._ends: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()
        self.handlers: Mapping[type[Event], EventHandler] = {
            **dict.fromkeys((events.StepBegin, events.WeightsServed, events.RunBegin), self._follow_versions),
            **dict.fromkeys((events.BackendUp, events.BackendDown, events.EngineLeave), self._follow_versions),
            events.GroupTrain: self._train_group,
            events.StepEnd: self._end_step,
            events.RequestStart: lambda time_s, event: self.versions.add_engine(event.who),
            events.SampleStart: self._start_sample,
            events.SampleFinish: self._finish_sample,
            events.SampleEnd: self._end_sample,
        }

    @property
    def dropped(self) -> int:
        return self._ends["dropped"]

    def add_past_drops(self, drops: Mapping[str, int]) -> None:
        """Count samples that were dropped before the first event that is seen, by reason."""
        self._drops.update(drops)
        self._ends["dropped"] += sum(drops.values())

    def _train_group(self, time_s: float, event: events.GroupTrain) -> None:
        self._lags[event.trained - event.oldest] += event.samples
        self._in_flight[event.in_flight] += event.samples
        self._in_queue[event.in_queue] += event.samples

    def _sums(self) -> tuple[int, int, int, int]:
        """Return the number of samples, and their lag, lag in flight and lag in queue, added up over samples."""
        columns = (self._lags, self._in_flight, self._in_queue)
        lag, in_flight, in_queue = (sum(lag * samples for lag, samples in column.items()) for column in columns)
        return self._lags.total(), lag, in_flight, in_queue

    def _follow_versions(self, time_s: float, event: Event) -> None:
        self._add_behind_until(time_s)
        self.versions.observe(event)
        self._behind_max = max(self._behind_max, self.versions.behind)

    def _end_step(self, time_s: float, event: events.StepEnd) -> None:
        self._follow_versions(time_s, event)
        if self._clock.is_opening:
            self._behind_at_start_s = self._behind_s
            self._sums_at_start = self._sums()
        self._behind_at_end_s = self._behind_s

    def _add_behind_until(self, time_s: float) -> None:
        self._behind_s += self.versions.behind * (time_s - self._behind_since_s)
        self._behind_since_s = time_s

    def _start_sample(self, time_s: float, event: events.SampleStart) -> None:
        self._started += event.who != VALIDATION_ROLE

    def _finish_sample(self, time_s: float, event: events.SampleFinish) -> None:
        self._finished += event.who != VALIDATION_ROLE

    def _end_sample(self, time_s: float, event: events.SampleEnd) -> None:
        self._ends[event.end] += 1
        if event.end == "dropped":
            self._drops[event.reason or "unknown"] += 1

    def lag(self) -> LagSummary:
        """Return what is known so far."""
        window = self._clock.window()
        if window.warmed_up:
            first, behind_s = self._sums_at_start, self._behind_at_end_s - self._behind_at_start_s
        else:
            self._add_behind_until(window.end_s)
            first, behind_s = (0, 0, 0, 0), self._behind_s
        samples, lag, in_flight, in_queue = (now - before for now, before in zip(self._sums(), first, strict=True))
        return LagSummary(
            histogram=self._make_histogram(),
            samples=self._lags.total(),
            max=max(self._lags, default=0),
            mean=lag / max(1, samples),
            mean_in_flight=in_flight / max(1, samples),
            mean_in_queue=in_queue / max(1, samples),
            behind_max=self._behind_max,
            behind_mean=behind_s / (window.seconds or 1.0),
        )

    def _make_histogram(self) -> tuple[LagBin, ...]:
        seen = [0, *self._lags, *self._in_flight, *self._in_queue]
        return tuple(
            LagBin(lag=lag, samples=self._lags[lag], in_flight=self._in_flight[lag], in_queue=self._in_queue[lag])
            for lag in range(min(seen), max(seen) + 1 if self._lags else 0)
        )

    def ends(self) -> SampleEndCounts:
        """Return how the samples ended so far."""
        return SampleEndCounts(
            started=self._started,
            finished=self._finished,
            trained=self._ends["trained"],
            dropped=self._ends["dropped"],
            saved=self._ends["saved"],
            drops=dict(sorted(self._drops.items(), key=lambda item: (-item[1], item[0]))),
        )
