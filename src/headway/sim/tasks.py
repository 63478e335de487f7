"""Simulated tasks: prompts of some length and nothing in them."""

from __future__ import annotations

from headway.config import simulation as costs
from headway.seeding import seeded
from headway.sim.latency import counter
from headway.types import Repeated, Task


class SimulatedTasks:
    """Tasks by position, without end unless `size` gives one. The same position gives the same task."""

    def __init__(self, simulation: costs.SimulationConfig, *, seed: int = 0, size: int | None = None) -> None:
        self._length = counter(simulation.prompt_tokens, key="simulation.prompt_tokens", least=0)
        self._seed = seed
        self._size = size

    def task(self, position: int) -> Task | None:
        if position < 0 or (self._size is not None and position >= self._size):
            return None
        return Task(position=position, prompt=Repeated(0, self._length(seeded(self._seed, "prompt", position))))
