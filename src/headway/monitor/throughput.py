"""How fast the run is: steps, seconds per step, samples and actions a second, reward per step.

Seconds per step are between one step end and the next, which is what a user waits for; `train_s` is the part of it
from the step's begin to its end. Samples and actions are counted where they are trained, so what is dropped does
not look like progress. One small record is kept for every step, nothing for every sample.

The reward of a step is what `step.end` reports as `reward`; where it does not, the mean over its samples of the group
rewards that were announced (`group.ready`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.monitor.event_log import LoggedEvent
from headway.monitor.measured_window import EventHandler, WindowClock

_APART = "train/behaviour_kl"
MISMATCH_LIMIT = 0.02
"""Rounding to bf16 makes a thousandth, in fp32 a millionth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step."""

    trained: int
    """Optimizer updates done after it."""
    end_s: float
    seconds: float
    """Since the end of the step before, or since the first event."""
    train_s: float
    """Since its own begin."""
    groups: int
    samples: int
    actions: int
    reward: float | None
    generated: int = 0
    """Actions of the requests that ended since the end of the step before, validation's included."""
    lag: float = 0.0
    """Mean over its samples, in versions."""
    replaced: int = 0
    """Groups with equal rewards that others were made for."""
    filled: int = 0
    """Such groups that it was trained on, for want of others."""
    tflop: float = 0.0
    """What its mathematics needed, in 10¹² operations, where the trainer says so."""
    peak_tflops: float = 0.0
    """What the chip could do in a second; 0: not known."""
    mismatch: float | None = None
    """KL of the trainer from the engines under the same weights, a token: only where all samples have lag 0 and one
    optimizer step was made, so that nothing else can be behind it."""

    @property
    def torn(self) -> bool:
        """The engines answered with something else than the policy that is trained."""
        return self.mismatch is not None and self.mismatch > MISMATCH_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSummary:
    """Speed of a run."""

    steps: tuple[StepRecord, ...]
    """Every step of the run, warm-up included."""
    samples: int
    """Samples trained, in the whole run."""
    actions: int
    """Actions trained, in the whole run."""
    step_mean_s: float
    step_p50_s: float
    step_p95_s: float
    train_mean_s: float
    train_tflops: float
    """10¹² operations a second while it trains; 0: not known."""
    mfu: float
    """The share of what the chip could do; 0: not known."""
    samples_per_s: float
    actions_per_s: float
    reward_first: float | None
    reward_last: float | None
    """Means over the first and the last tenth of the steps that have a reward."""


@dataclass(slots=True)
class _OpenStep:
    """What has been consumed for a step that has not ended."""

    groups: int = 0
    samples: int = 0
    actions: int = 0
    rewarded: int = 0
    reward: float = 0.0
    lag: int = 0


class ThroughputRecorder:
    """Accumulates one record a step from `group.ready`, `group.train` and `step.*`."""

    def __init__(self, clock: WindowClock) -> None:
        self._clock = clock
        self.steps: list[StepRecord] = []
        self._rewards: dict[object, float] = {}
        self._open: dict[int, _OpenStep] = {}
        self._begun_s: float | None = None
        self._resumed_s: float | None = None
        self.generated = 0
        """Actions made since the end of the last step."""
        self.handlers: Mapping[str, EventHandler] = {
            "run.begin": self._run_begin,
            "request.end": self._request_end,
            "group.ready": self._group_ready,
            "group.drop": self._group_drop,
            "group.train": self._group_train,
            "step.begin": self._step_begin,
            "step.end": self._step_end,
        }

    def _run_begin(self, event: LoggedEvent) -> None:
        """A new process: the step that was under way is made again, and the pause between the two is no step's."""
        self._open.clear()
        self._begun_s = None
        self._resumed_s = event.time_s

    def _request_end(self, event: LoggedEvent) -> None:
        self.generated += event.data.get("actions", 0)

    def _group_ready(self, event: LoggedEvent) -> None:
        reward = _number(event.data.get("reward"))
        if reward is not None:
            self._rewards[event.data["group"]] = reward

    def _group_drop(self, event: LoggedEvent) -> None:
        self._rewards.pop(event.data["group"], None)

    def _group_train(self, event: LoggedEvent) -> None:
        data = event.data
        samples = data.get("samples", 1)
        step = self._open.get(data["trained"])
        if step is None:
            step = self._open[data["trained"]] = _OpenStep()
        step.groups += 1
        step.samples += samples
        step.actions += data.get("actions", 0)
        step.lag += samples * (data["trained"] - data["oldest"])
        reward = self._rewards.pop(data["group"], None)
        if reward is not None:
            step.rewarded += samples
            step.reward += samples * reward

    def _step_begin(self, event: LoggedEvent) -> None:
        self._begun_s = event.time_s

    def _step_end(self, event: LoggedEvent) -> None:
        time_s, data = event.time_s, event.data
        step = self._close(data["trained"])
        before_s = self._before_s()
        reported = _number(data.get("reward"))
        record = StepRecord(
            trained=data["trained"],
            end_s=time_s,
            seconds=time_s - before_s,
            train_s=time_s - (before_s if self._begun_s is None else self._begun_s),
            groups=step.groups,
            samples=step.samples,
            actions=step.actions,
            reward=step.reward / step.rewarded if reported is None and step.rewarded else reported,
            generated=self.generated,
            lag=step.lag / max(1, step.samples),
            replaced=data.get("replaced", 0),
            filled=data.get("filled", 0),
            tflop=_number(data.get("train/tflop")) or 0.0,
            peak_tflops=_number(data.get("train/peak_tflops")) or 0.0,
            mismatch=None if step.lag or data.get("train/optimizer_steps") != 1 else _number(data.get(_APART)),
        )
        self._begun_s = self._resumed_s = None
        self.generated = 0
        self.steps.append(record)

    def _before_s(self) -> float:
        """What the step under way is counted from."""
        if self._resumed_s is not None:
            return self._resumed_s
        return self.steps[-1].end_s if self.steps else self._clock.first_s or 0.0

    def _close(self, trained: int) -> _OpenStep:
        """What was consumed below this version; usually the step before it, more after a failed one."""
        total = _OpenStep()
        for version in [version for version in self._open if version < trained]:
            step = self._open.pop(version)
            total.groups += step.groups
            total.samples += step.samples
            total.actions += step.actions
            total.rewarded += step.rewarded
            total.reward += step.reward
            total.lag += step.lag
        return total

    def throughput(self) -> ThroughputSummary:
        """What is known so far."""
        window = self._clock.window()
        measured = self.steps[-window.steps :] if window.steps else []
        seconds = sorted(step.seconds for step in measured)
        length_s = window.seconds or 1.0
        first, last = _reward_ends(self.steps)
        train_s = sum(step.train_s for step in measured)
        tflops = sum(step.tflop for step in measured) / (train_s or 1.0)
        peak = max((step.peak_tflops for step in measured), default=0.0)
        return ThroughputSummary(
            steps=tuple(self.steps),
            samples=sum(step.samples for step in self.steps),
            actions=sum(step.actions for step in self.steps),
            step_mean_s=_mean(seconds),
            step_p50_s=compute_quantile(seconds, 0.50),
            step_p95_s=compute_quantile(seconds, 0.95),
            train_mean_s=_mean([step.train_s for step in measured]),
            train_tflops=tflops,
            mfu=tflops / peak if peak else 0.0,
            samples_per_s=sum(step.samples for step in measured) / length_s,
            actions_per_s=sum(step.actions for step in measured) / length_s,
            reward_first=first,
            reward_last=last,
        )


def compute_quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours; 0 for nothing."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _reward_ends(steps: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    rewards = [step.reward for step in steps if step.reward is not None]
    if not rewards:
        return None, None
    tenth = max(1, len(rewards) // 10)
    return _mean(rewards[:tenth]), _mean(rewards[-tenth:])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
