"""How far off-policy the run is: the lag of what was trained, the distance between served and trained, the drops.

The lag of a sample is `trained − oldest` at the moment of consumption, never judged against `served`. It has two
parts: versions that passed while the sample was being made (in flight), and while it waited in the line (in
queue). Histograms count samples, not groups, and cover the whole run: the bound is a promise about every sample.

`behind` is how many versions the slowest live engine serves behind the trainer, weighted by time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headway.monitor.event_log import LoggedEvent
from headway.monitor.measured_window import EventHandler, WindowClock

VALIDATION_ROLE = "validate"
"""Who starts samples that are judged and never trained: they have no end, and are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagBin:
    """How many samples had this lag; each column adds up to the samples trained."""

    lag: int
    samples: int
    """Samples whose whole lag was `lag` versions."""
    in_flight: int
    """Samples that got `lag` versions older while they were made."""
    in_queue: int
    """Samples that got `lag` versions older while they waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagSummary:
    """Off-policyness of a run."""

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
    """How the samples of the whole run ended."""

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
    """The trained version, and the oldest version that any live engine serves.

    An engine that works without having reported is taken to serve what the slowest other one does, and before any
    has reported what the trainer started from.
    """

    __slots__ = ("_engines", "_serving", "served", "trained")

    def __init__(self) -> None:
        self.trained: int | None = None
        self.served: int | None = None
        self._engines: dict[str, int] = {}
        # Engines by version: the minimum is over the few versions in service, not over thousands of engines.
        self._serving: Counter[int] = Counter()

    @property
    def behind(self) -> int:
        """Versions between the trainer and the slowest engine."""
        if self.trained is None or self.served is None:
            return 0
        return max(0, self.trained - self.served)

    def take(self, event: LoggedEvent) -> bool:
        """Follow an event; whether it was one about versions."""
        kind, who, data = event.kind, event.who, event.data
        if who == "trainer":
            return False
        if kind == "served" or (kind == "up" and "version" in data):
            if self.trained is None and "trained" in data:
                self.trains(data["trained"])
            self.serves(who, data["version"])
        elif kind == "step.begin":
            self.trains(data["trained"])
        elif kind == "step.end":
            if self.trained is None:
                self.trains(data["trained"] - 1)
            self.trains(data["trained"])
        elif kind in ("down", "leave"):
            self.loses(who)
        elif kind == "run.begin":
            self.forget_engines()
        else:
            return False
        return True

    def trains(self, trained: int) -> None:
        """The trainer holds this version."""
        if self.trained is None:
            self.served = min(self._serving, default=trained)
        self.trained = trained

    def meets(self, engine: str) -> None:
        """An engine is at work that may not have reported a version."""
        if engine not in self._engines:
            self.serves(engine, self.served or 0)

    def serves(self, engine: str, version: int) -> None:
        """An engine answers with this version from now on."""
        self._leave(engine)
        self._engines[engine] = version
        self._serving[version] += 1
        self.served = min(self._serving)

    def loses(self, engine: str) -> None:
        """An engine is down: nobody waits for its version."""
        self._leave(engine)
        self.served = min(self._serving, default=self.served)

    def forget_engines(self) -> None:
        """A new process: its engines say what they serve."""
        self._engines.clear()
        self._serving.clear()

    def _leave(self, engine: str) -> None:
        version = self._engines.pop(engine, None)
        if version is None:
            return
        if self._serving[version] > 1:
            self._serving[version] -= 1
        else:
            del self._serving[version]


@dataclass(slots=True)
class _Sums:
    """Lag of all samples so far, times samples."""

    samples: int = 0
    lag: int = 0
    in_flight: int = 0
    in_queue: int = 0


class LagRecorder:
    """Accumulates lag from `group.train`, `step.*`, `served` and the ends of samples."""

    def __init__(self, clock: WindowClock) -> None:
        self._clock = clock
        self.versions = VersionTracker()
        self._lags: Counter[int] = Counter()
        self._in_flight: Counter[int] = Counter()
        self._in_queue: Counter[int] = Counter()
        self._sums = _Sums()
        self._sums_at_start = _Sums()
        self._behind_s = 0.0
        self._behind_since_s = 0.0
        self._behind_at_start_s = 0.0
        self._behind_at_end_s = 0.0
        self._behind_max = 0
        self._started = 0
        self._finished = 0
        self._ends: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()
        self.handlers: Mapping[str, EventHandler] = {
            "group.train": self._group_train,
            **dict.fromkeys(("step.begin", "served", "up", "down", "leave", "run.begin"), self._follow),
            "step.end": self._step_end,
            "request.start": self._request_start,
            "sample.start": self._sample_start,
            "sample.finish": self._sample_finish,
            "sample.end": self._sample_end,
        }

    @property
    def dropped(self) -> int:
        """Samples dropped so far."""
        return self._ends["dropped"]

    def _group_train(self, event: LoggedEvent) -> None:
        data = event.data
        samples = data.get("samples", 1)
        lag, in_flight, in_queue = data["trained"] - data["oldest"], data["in_flight"], data["in_queue"]
        self._lags[lag] += samples
        self._in_flight[in_flight] += samples
        self._in_queue[in_queue] += samples
        sums = self._sums
        sums.samples += samples
        sums.lag += samples * lag
        sums.in_flight += samples * in_flight
        sums.in_queue += samples * in_queue

    def _follow(self, event: LoggedEvent) -> None:
        self._settle(event.time_s)
        self.versions.take(event)
        self._behind_max = max(self._behind_max, self.versions.behind)

    def _step_end(self, event: LoggedEvent) -> None:
        self._follow(event)
        if self._clock.opens:
            self._behind_at_start_s = self._behind_s
            self._sums_at_start = _Sums(self._sums.samples, self._sums.lag, self._sums.in_flight, self._sums.in_queue)
        self._behind_at_end_s = self._behind_s

    def _request_start(self, event: LoggedEvent) -> None:
        self.versions.meets(event.who)

    def _settle(self, time_s: float) -> None:
        self._behind_s += self.versions.behind * (time_s - self._behind_since_s)
        self._behind_since_s = time_s

    def _sample_start(self, event: LoggedEvent) -> None:
        self._started += event.who != VALIDATION_ROLE

    def _sample_finish(self, event: LoggedEvent) -> None:
        self._finished += event.who != VALIDATION_ROLE

    def _sample_end(self, event: LoggedEvent) -> None:
        end = event.data["end"]
        self._ends[end] += 1
        if end == "dropped":
            self._drops[event.data.get("reason", "unknown")] += 1

    def lag(self) -> LagSummary:
        """What is known so far."""
        window = self._clock.window()
        if window.warmed_up:
            first, behind_s = self._sums_at_start, self._behind_at_end_s - self._behind_at_start_s
        else:
            self._settle(window.end_s)
            first, behind_s = _Sums(), self._behind_s
        samples = max(1, self._sums.samples - first.samples)
        return LagSummary(
            histogram=self._histogram(),
            samples=self._sums.samples,
            max=max(self._lags, default=0),
            mean=(self._sums.lag - first.lag) / samples,
            mean_in_flight=(self._sums.in_flight - first.in_flight) / samples,
            mean_in_queue=(self._sums.in_queue - first.in_queue) / samples,
            behind_max=self._behind_max,
            behind_mean=behind_s / (window.seconds or 1.0),
        )

    def _histogram(self) -> tuple[LagBin, ...]:
        columns = (self._lags, self._in_flight, self._in_queue)
        seen = [lag for column in columns for lag in column]
        if not seen:
            return ()
        return tuple(
            LagBin(lag=lag, samples=columns[0][lag], in_flight=columns[1][lag], in_queue=columns[2][lag])
            for lag in range(min(0, *seen), max(seen) + 1)
        )

    def ends(self) -> SampleEndCounts:
        """How the samples ended so far."""
        drops = dict(sorted(self._drops.items(), key=lambda item: (-item[1], item[0])))
        return SampleEndCounts(
            started=self._started,
            finished=self._finished,
            trained=self._ends["trained"],
            dropped=self._ends["dropped"],
            saved=self._ends["saved"],
            drops=drops,
        )
