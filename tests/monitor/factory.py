"""Events to test with: single ones, and a whole made-up run from a seed.

The made-up run is a toy with the shapes of a real one (three stages, engines with slots, a bounded lead, weights
that arrive late, drops and a crash); it tests what reads events, not the scheduler.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from headway.monitor.event_log import LoggedEvent, parse_event
from headway.monitor.events import StepEnd

NASTY = "</script><img src=x onerror=\"alert('1')\"> & <!-- \u2028 ' \" \\"


def ev(time_s: float, kind: str, who: str = "", **data: Any) -> LoggedEvent:
    return LoggedEvent(time_s, parse_event(kind, who, data))


def step(begin_s: float, end_s: float, trained: int, **metrics: float) -> list[LoggedEvent]:
    """The two events of the step that makes version `trained`."""
    return [
        ev(begin_s, "step.begin", "train", trained=trained - 1, groups=1),
        ev(end_s, "step.end", "train", trained=trained, groups=1, **metrics),
    ]


def in_order(*parts: Iterable[LoggedEvent]) -> list[LoggedEvent]:
    return sorted(itertools.chain(*parts), key=lambda event: event.time_s)


class ToyRun:
    """A heap of callbacks on a made-up clock, writing events as it goes."""

    def __init__(self, *, seed: int = 0, engines: int = 8, slots: int = 4, batch: int = 8, steps: int = 24) -> None:
        self.random = Random(seed)
        self.events: list[LoggedEvent] = []
        self.now = 0.0
        self.batch, self.steps = batch, steps
        self.trained = 0
        self.served = [0] * engines
        self.slots = [slots] * engines
        self.lead = 2 * batch
        self.outstanding = 0
        self.ready: deque[tuple[int, int]] = deque()
        self.missing: dict[int, int] = {}
        self.training = False
        self.states = dict.fromkeys(("generate", "reward", "train"), "idle")
        self.queue: deque[tuple[int, int]] = deque()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()

    def run(self) -> list[LoggedEvent]:
        for stage in self.states:
            self.state(stage, "waiting")
        self.admit()
        self.after(31.0, self.crash)
        while self._heap and self.trained < self.steps:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        for stage in self.states:
            self.state(stage, "stopped")
        return self.events

    def emit(self, kind: str, who: str, **data: Any) -> None:
        self.events.append(ev(self.now, kind, who, **data))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._ids), call))

    def state(self, stage: str, new: str) -> None:
        if self.states[stage] != new:
            self.emit("state", stage, old=self.states[stage], new=new)
            self.states[stage] = new

    def admit(self) -> None:
        while self.outstanding < self.lead:
            group = next(self._ids)
            self.outstanding += 1
            self.missing[group] = 4
            self.emit("group.start", "generate", group=group, position=group, served=min(self.served))
            self.queue.extend((group, member) for member in range(4))
        self.dispatch()

    def dispatch(self) -> None:
        while self.queue and max(self.slots) > 0:
            engine = self.slots.index(max(self.slots))
            group, member = self.queue.popleft()
            self.slots[engine] -= 1
            sample, version = f"{group}/{member}", self.served[engine]
            self.emit("sample.start", "generate", sample=sample)
            self.emit("request.start", f"engine/{engine}", request=sample)
            length = int(self.random.lognormvariate(6.0, 0.7))
            self.after(length / 150, lambda e=engine, s=sample, n=length, v=version: self.finish(e, s, n, v))
        self.state("generate", "running" if min(self.slots) < max(self.slots) or self.queue else "waiting")

    def finish(self, engine: int, sample: str, length: int, version: int) -> None:
        self.emit("request.end", f"engine/{engine}", request=sample, actions=length, finish="stop")
        newest = self.served[engine]
        self.emit("sample.finish", "generate", sample=sample, actions=length, oldest=version, newest=newest)
        self.slots[engine] += 1
        group = int(sample.split("/")[0])
        self.missing[group] -= 1
        if not self.missing[group]:
            self.state("reward", "running")
            self.after(0.4, lambda: self.score(group, version))
        self.emit("score.start", "reward", sample=sample)
        self.after(0.4, lambda: self.emit("score.end", "reward", sample=sample))
        self.dispatch()

    def score(self, group: int, oldest: int) -> None:
        self.state("reward", "waiting")
        reward = 0.2 + 0.6 * self.trained / (self.trained + 10) + self.random.gauss(0, 0.05)
        if self.random.random() < 0.06 or self.trained - oldest > 1:
            reason = "zero_variance" if self.trained - oldest <= 1 else "stale_in_flight"
            self.emit("group.drop", "reward", group=group, reason=reason)
            for member in range(4):
                self.emit("sample.end", "reward", sample=f"{group}/{member}", end="dropped", reason=reason)
            self.outstanding -= 1
            self.admit()
            return
        self.emit("group.ready", "reward", group=group, reward=reward)
        self.ready.append((group, oldest))
        self.train()

    def train(self) -> None:
        if self.training or len(self.ready) < self.batch:
            return
        self.training = True
        self.state("train", "running")
        self.emit("step.begin", "train", trained=self.trained, groups=self.batch)
        for _ in range(self.batch):
            group, oldest = self.ready.popleft()
            lag = self.trained - oldest
            flight = min(lag, self.random.randint(0, 1))
            self.emit("group.train", "train", group=group, trained=self.trained, oldest=oldest, in_flight=flight,
                      in_queue=lag - flight, samples=4, actions=1600)  # fmt: skip
            for member in range(4):
                self.emit("sample.end", "train", sample=f"{group}/{member}", end="trained")
        self.after(self.random.uniform(3.0, 4.0), self.step_end)

    def step_end(self) -> None:
        self.trained += 1
        self.training = False
        self.emit("step.end", "train", trained=self.trained, groups=self.batch, loss=0.1)
        self.state("train", "emitting")
        self.state("train", "waiting")
        version = self.trained
        self.emit("span.begin", "param_update", span=version, name="send")
        self.after(0.8, lambda: self.emit("span.end", "param_update", span=version, name="send"))
        for engine in range(len(self.served)):
            self.after(0.8 + 0.05 * engine, lambda e=engine: self.serve(e, version))
        self.train()

    def serve(self, engine: int, version: int) -> None:
        self.served[engine] = version
        self.emit("served", f"engine/{engine}", version=version, trained=self.trained)
        if min(self.served) == version:
            self.outstanding -= self.batch
            self.admit()

    def crash(self) -> None:
        self.emit("error", "engine/2", error="EngineCrashed", message=f"CUDA error {NASTY}")
        self.emit("restart", "engine/2", attempt=1)


def toy_run(**options: int) -> list[LoggedEvent]:
    return ToyRun(**options).run()


def training_run(*, steps: int = 24, seed: int = 0, eval_steps: int = 5, finished: bool = True) -> list[LoggedEvent]:
    """A toy run with what `headway train` adds: its begin and end, rewards, a trainer's metrics, validations."""
    random = Random(seed)
    events = [ev(0.0, "run.begin", "run", resumed=False, trained=0, steps=steps, machine="2 cores", headway="0.1.0")]
    events.append(ev(0.0, "validate.end", "validate", trained=0, reward=0.1, samples=64))
    for event in toy_run(steps=steps, seed=seed):
        if not isinstance(event.event, StepEnd):
            events.append(event)
            continue
        trained = event.event.trained
        skill = trained / (trained + steps / 3)
        data = event.data | {
            "samples": 32,
            "actions": 12800,
            "reward": 0.1 + 0.7 * skill + random.gauss(0, 0.06),
            "length/started": 410.0,
            "length/dropped": 600.0,
            "length/trained": 400.0,
            "bias/length": 400.0 / 410.0 - 1,
            "bias/reward": 0.001,
            "train/loss": random.gauss(0, 0.02),
            "train/entropy": 1.4 - 0.9 * skill + random.gauss(0, 0.03),
            "train/grad_norm": 0.4 + abs(random.gauss(0, 0.2)),
            "train/behaviour_kl": 0.002 + abs(random.gauss(0, 0.001)),
            "train/clip_fraction": abs(random.gauss(0, 0.01)),
            "train/kl_loss": 0.0,
            "train/learning_rate": 1e-5,
        }
        events.append(ev(event.time_s, event.kind, event.who, **data))
        if trained % eval_steps == 0:
            held_out = 0.1 + 0.6 * skill
            events.append(ev(event.time_s, "validate.end", "validate", trained=trained, reward=held_out, samples=64))
    if finished:
        events.append(ev(events[-1].time_s, "run.end", "run", trained=steps, finished=True))
    return events


def resumed_run(*, first: int = 12, back_to: int = 10, then: int = 8) -> list[LoggedEvent]:
    """A run that was killed after step `first` and went on from its checkpoint at `back_to`."""
    before = training_run(steps=first, finished=False)
    gone_s = before[-1].time_s
    events = list(before)
    for event in training_run(steps=then, seed=1):
        data = dict(event.data)
        if event.kind == "run.begin":
            data.update(resumed=True, trained=back_to)
        elif event.kind == "validate.end" and data["trained"] == 0:
            continue
        else:
            for key in ("trained", "oldest", "served", "version"):
                if key in data:
                    data[key] += back_to
        events.append(ev(event.time_s + gone_s, event.kind, event.who, **data))
    return events
