"""Events as series of numbers: the one place that decides what a curve is called and what it means.

| name | meaning, over the step |
|---|---|
| `reward/train`, `reward/held_out` | mean reward of what was trained; of the held-out tasks |
| `lag/mean`, `lag/max` | versions between the oldest token of a sample and the policy it trained |
| `throughput/samples_per_s`, `throughput/tokens_per_s` | trained, by the time since the step before |
| `throughput/generated_tokens_per_s` | made by the engines in that time, validation included |
| `time/step_s`, `time/train_s`, `time/wait_s` | since the step before; of which training; of which not |
| `response/length`, `response/truncated` | actions of a trained sample; share of requests cut off at the limit |
| `episode/success`, `episode/turns`, `episode/invalid` | of episodes that ended: share that succeeded, mean number of \
turns, share of turns not understood; `held_out/…` the same of validation |
| `groups/with_spread` | share of judged groups whose rewards differ; 1 where equal ones are not filtered |
| `groups/replaced`, `groups/filled` | with equal rewards: replaced for the step; trained all the same, to fill it |
| `drops/<reason>` | samples dropped since the step before; from the first drop of that reason on |
| `train/<metric>` | as the trainer reports it |

The step of a point is the trained version. Numbers are not smoothed and not judged: a NaN comes through as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeGuard

from headway.monitor.episode_outcomes import EpisodeOutcomeMeter, make_validation_outcomes
from headway.monitor.event_log import LoggedEvent

HELD_OUT_REWARD = "reward/held_out"
_EQUAL_REWARDS = "zero_variance"
_CUT_OFF = "length"


class ScalarPoint(NamedTuple):
    """Numbers of one step."""

    step: int
    time_s: float
    values: dict[str, float]
    rewind: bool = False
    """Whatever was said before about this step and later ones is void: they were lost and are made again."""


class ScalarMeter:
    """Turns events into points, one call an event. Kinds that no curve needs cost one look-up."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._begun_s: float | None = None
        self._last = -1
        self._drops: Counter[str] = Counter()
        self._episodes = EpisodeOutcomeMeter()
        self._start_afresh()
        self._handlers: dict[str, Callable[[LoggedEvent], ScalarPoint | None]] = {
            "run.begin": self._run_begin,
            "request.end": self._request_end,
            "group.ready": self._group_ready,
            "group.drop": self._group_drop,
            "sample.end": self._sample_end,
            "step.begin": self._step_begin,
            "group.train": self._group_train,
            "step.end": self._step_end,
            "sample.finish": self._sample_finish,
            "validate.end": self._validated,
        }

    def _start_afresh(self) -> None:
        """Nothing has been counted for the next step yet."""
        self._generated = self._requests = self._cut_off = self._ready = self._equal = 0
        self._samples = self._actions = self._lag = self._lag_max = 0
        self._episodes.clear()
        self._drops = Counter(dict.fromkeys(self._drops, 0))

    def __call__(self, event: LoggedEvent) -> ScalarPoint | None:
        if self._step_s is None:
            self._step_s = event.time_s
        handler = self._handlers.get(event.kind)
        return handler(event) if handler else None

    def _run_begin(self, event: LoggedEvent) -> ScalarPoint:
        """A new process, which cannot know what the one before it said: all it does not go on from is void."""
        self._start_afresh()
        self._step_s, self._begun_s = event.time_s, None
        first = event.data.get("trained", 0) + 1 if event.data.get("resumed") else 0
        self._last = first - 1
        return ScalarPoint(first, event.time_s, {}, rewind=True)

    def _request_end(self, event: LoggedEvent) -> None:
        self._generated += event.data.get("actions", 0)
        self._requests += 1
        self._cut_off += event.data.get("finish") == _CUT_OFF

    def _sample_finish(self, event: LoggedEvent) -> None:
        if event.who == "generate":
            self._episodes.add(event.data)

    def _group_ready(self, event: LoggedEvent) -> None:
        equal = event.data.get("equal", False)
        self._ready += not equal
        self._equal += equal

    def _group_drop(self, event: LoggedEvent) -> None:
        self._equal += event.data.get("reason") == _EQUAL_REWARDS

    def _sample_end(self, event: LoggedEvent) -> None:
        if event.data["end"] == "dropped":
            self._drops[event.data.get("reason", "unknown")] += 1

    def _step_begin(self, event: LoggedEvent) -> None:
        self._begun_s = event.time_s
        self._samples = self._actions = self._lag = self._lag_max = 0

    def _group_train(self, event: LoggedEvent) -> None:
        data = event.data
        samples, lag = data.get("samples", 1), data["trained"] - data["oldest"]
        self._samples += samples
        self._actions += data.get("actions", 0)
        self._lag += samples * lag
        self._lag_max = max(self._lag_max, lag)

    def _step_end(self, event: LoggedEvent) -> ScalarPoint:
        time_s, data = event.time_s, event.data
        step, before_s = data["trained"], self._step_s if self._step_s is not None else time_s
        values: dict[str, float] = {}
        if _is_number(data.get("reward")):
            values["reward/train"] = data["reward"]
        values["time/step_s"] = spent_s = time_s - before_s
        if self._begun_s is not None:
            values["time/train_s"] = time_s - self._begun_s
            values["time/wait_s"] = max(0.0, self._begun_s - before_s)
            values |= self._trained_values(spent_s)
        values |= self._made_values(spent_s)
        values |= {f"groups/{name}": data[name] for name in ("replaced", "filled") if name in data}
        values |= {name: value for name, value in data.items() if name.startswith("train/") and _is_number(value)}
        outcomes = self._episodes.take(step)
        if outcomes is not None:
            values |= {f"episode/{name}": value for name, value in outcomes.values().items()}
        rewind, self._last = step <= self._last, step
        self._step_s, self._begun_s = time_s, None
        self._start_afresh()
        return ScalarPoint(step, time_s, values, rewind)

    def _trained_values(self, spent_s: float) -> dict[str, float]:
        if not self._samples:
            return {}
        rates = {"samples_per_s": self._samples / spent_s, "tokens_per_s": self._actions / spent_s} if spent_s else {}
        return {
            "lag/mean": self._lag / self._samples,
            "lag/max": self._lag_max,
            "response/length": self._actions / self._samples,
            **{f"throughput/{name}": value for name, value in rates.items()},
        }

    def _made_values(self, spent_s: float) -> dict[str, float]:
        values: dict[str, float] = {f"drops/{reason}": count for reason, count in self._drops.items()}
        if self._requests:
            values["response/truncated"] = self._cut_off / self._requests
            if spent_s:
                values["throughput/generated_tokens_per_s"] = self._generated / spent_s
        if self._ready + self._equal:
            values["groups/with_spread"] = self._ready / (self._ready + self._equal)
        return values

    def _validated(self, event: LoggedEvent) -> ScalarPoint | None:
        reward = event.data.get("reward")
        if not _is_number(reward):
            return None
        outcomes = make_validation_outcomes(event.data)
        values = {} if outcomes is None else {f"held_out/{name}": value for name, value in outcomes.values().items()}
        return ScalarPoint(event.data["trained"], event.time_s, {HELD_OUT_REWARD: reward, **values})


def compute_scalars(events: Iterable[LoggedEvent]) -> Iterator[ScalarPoint]:
    """The points of a recorded run, in the order they happened."""
    meter = ScalarMeter()
    for event in events:
        point = meter(event)
        if point is not None:
            yield point


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
