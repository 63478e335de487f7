"""Simulated environments: turns that take time, sometimes hang, crawl or fail.

What an episode draws depends only on the seed, the task's position and how many episodes that position has had, so
the order in which the scheduler happens to run episodes changes nothing. The first observation is the prompt; later
ones add no tokens. The last one carries a reward of 0 or 1, for runs that take the environment's word for it.
"""

from __future__ import annotations

import asyncio

from headway.config import simulation as costs
from headway.environments.base import Observation
from headway.errors import EnvironmentFailed
from headway.seeding import Rng, seeded
from headway.sim.health import Health
from headway.sim.latency import counter, sampler
from headway.types import Generation, Repeated, Task


class SimulatedEnvironments:
    """The factory: one environment for each episode. Target `environment` of the faults."""

    def __init__(self, simulation: costs.SimulationConfig, *, seed: int = 0, health: Health | None = None) -> None:
        world = simulation.environment
        self.world = world
        self.health = health or Health("environment")
        self.turns = counter(world.turns, key="simulation.environment.turns")
        self.reset_s = sampler(world.reset_s, key="simulation.environment.reset_s")
        self.step_s = sampler(world.step_s, key="simulation.environment.step_s")
        self.response = counter(simulation.response_tokens, key="simulation.response_tokens")
        self.prompt = counter(simulation.prompt_tokens, key="simulation.prompt_tokens", least=0)
        self._seed = seed
        self._episodes: dict[int, int] = {}

    def __call__(self, task: Task) -> SimulatedEnvironment:
        episode = self._episodes.get(task.position, 0)
        self._episodes[task.position] = episode + 1
        return SimulatedEnvironment(self, seeded(self._seed, "environment", task.position, episode))

    def prompt_of(self, task: Task) -> Repeated:
        """The prompt of a task that came without one: the same for every episode of its position."""
        return Repeated(0, self.prompt(seeded(self._seed, "prompt", task.position)))


class SimulatedEnvironment:
    """One episode."""

    __slots__ = ("_left", "_pace", "_rng", "_shared")

    def __init__(self, shared: SimulatedEnvironments, rng: Rng) -> None:
        self._shared = shared
        self._rng = rng
        self._left = 0
        """Turns to go."""
        self._pace = 1.0

    async def reset(self, task: Task) -> Observation:
        shared, rng = self._shared, self._rng
        self._left = shared.turns(rng)
        if shared.world.slow_probability and rng.random() < shared.world.slow_probability:
            self._pace = shared.world.slow_factor
        await shared.health.deliver(EnvironmentFailed)
        await shared.health.spend(shared.reset_s(rng) * self._pace, EnvironmentFailed)
        return Observation(tokens=task.prompt or shared.prompt_of(task), hint=shared.response(rng))

    async def step(self, generation: Generation) -> Observation:
        shared, rng, world = self._shared, self._rng, self._shared.world
        seconds = shared.step_s(rng) * self._pace
        if world.hang_probability and rng.random() < world.hang_probability:
            await asyncio.get_running_loop().create_future()
        fails = world.failure_probability and rng.random() < world.failure_probability
        await shared.health.deliver(EnvironmentFailed)
        await shared.health.spend(seconds, EnvironmentFailed)
        if fails:
            raise EnvironmentFailed(f"a simulated step failed with {self._left} turns to go")
        self._left -= 1
        if self._left <= 0:
            return Observation(done=True, reward=float(rng.random() < 0.5))
        return Observation(hint=shared.response(rng))

    async def close(self) -> None:
        return None
