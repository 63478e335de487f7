"""Scheduler and runner together, one step at a time: an engine without threads or a clock.

Everything here runs in one thread. What it returns are deliveries: news of requests, each made by one version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from headway.engines.native.parameters import Values
from headway.engines.native.runner import Runner
from headway.engines.native.scheduler import Delivery, Scheduler
from headway.engines.native.sequence import Sequence


class Core(ABC):
    """One replica's state. `install` serves other weights from the next step on."""

    def __init__(self, scheduler: Scheduler, install: Callable[[Values], None]) -> None:
        self.scheduler = scheduler
        self.version = -1
        self.made_by = -1
        """The version behind what was returned last."""
        self.steps = 0
        self._install = install
        self._paused = False

    @property
    def runnable(self) -> bool:
        """Whether `step` would do anything."""
        return not self._paused and self.scheduler.busy

    def add(self, sequence: Sequence) -> list[Delivery]:
        """Take a request in."""
        self.scheduler.add(sequence)
        return []

    def abort(self, number: int) -> list[Delivery]:
        """End a sequence here and now."""
        delivery = self.scheduler.remove(number)
        return [] if delivery is None else [delivery]

    def pause(self) -> list[Delivery]:
        """No more steps until `resume`; everything made so far is delivered."""
        self._paused = True
        return self._settled()

    def resume(self) -> list[Delivery]:
        """Steps again."""
        self._paused = False
        return []

    def flip(self, values: Values, version: int) -> list[Delivery]:
        """Serve other weights from the next step on; what is delivered was made by the old ones."""
        self._install(values)
        made = self.scheduler.flush()
        self.scheduler.other_weights()
        self.version = version
        return made

    def _settled(self) -> list[Delivery]:
        """Everything made so far."""
        return self.scheduler.flush()

    @abstractmethod
    def step(self) -> list[Delivery]:
        """Something for everyone who is due."""


class StepCore(Core):
    """One token at a time, each looked at."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        super().__init__(scheduler, runner.install)
        self._runner = runner

    def step(self) -> list[Delivery]:
        """One token for everyone who is due."""
        plan = self.scheduler.plan()
        tokens, logps = self._runner.step(plan)
        self.steps += 1
        self.made_by = self.version
        return self.scheduler.commit(plan, tokens, logps)
