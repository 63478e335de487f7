"""Simulated tasks, environments and rewards: what an episode of a simulated run is made of.

Prompts have a length and no content. Turns take time and sometimes hang, crawl or fail; the first observation is the
prompt, later ones add no tokens. Rewards are 0 or 1, harder or easier by prompt: prompts of the `zero_variance_share`
give every member of a group the same reward, the others have a difficulty around one half, so their groups nearly
always vary. Everything drawn depends only on the seed, the position of the task, and which episode or sample of it this
is, so the order in which the scheduler happens to run episodes changes nothing.
"""

from __future__ import annotations

import asyncio
import math

from headway.config import simulation_config as costs
from headway.environments.base import Observation
from headway.errors import EnvironmentFailed, RewardError
from headway.seeding import Rng, make_rng
from headway.sim.distributions import make_count_sampler, make_sampler, make_score_sampler
from headway.sim.fault_injection import BackendHealth
from headway.types import Episode, Generation, RepeatedValue, Score, Task


class SimulatedTasks:
    """Tasks by position, endless unless `size` limits them. The same position gives the same task."""

    def __init__(self, simulation: costs.SimulationConfig, *, seed: int = 0, size: int | None = None) -> None:
        self._length = make_count_sampler(simulation.prompt_tokens, key="simulation.prompt_tokens", least=0)
        self._seed = seed
        self._size = size

    def task(self, position: int) -> Task | None:
        if position < 0 or (self._size is not None and position >= self._size):
            return None
        return Task(position=position, prompt=RepeatedValue(0, self._length(make_rng(self._seed, "prompt", position))))


class SimulatedEnvironments:
    """Makes one environment per episode. Faults call it `environment`."""

    def __init__(
        self, simulation: costs.SimulationConfig, *, seed: int = 0, health: BackendHealth | None = None
    ) -> None:
        self.cost = cost = simulation.environment
        self.health = health or BackendHealth("environment")
        self.turns = make_count_sampler(cost.turns, key="simulation.environment.turns")
        self.reset_s = make_sampler(cost.reset_s, key="simulation.environment.reset_s")
        self.step_s = make_sampler(cost.step_s, key="simulation.environment.step_s")
        self._response = make_count_sampler(simulation.response_tokens, key="simulation.response_tokens")
        self._at_score = make_score_sampler(simulation.response_tokens, key="simulation.response_tokens")
        self._correlation = simulation.response_correlation
        self.prompt = make_count_sampler(simulation.prompt_tokens, key="simulation.prompt_tokens", least=0)
        self._seed = seed
        self._episodes: dict[int, int] = {}

    def __call__(self, task: Task) -> SimulatedEnvironment:
        episode = self._episodes.get(task.position, 0)
        self._episodes[task.position] = episode + 1
        return SimulatedEnvironment(self, task.position, make_rng(self._seed, "environment", task.position, episode))

    def draw_response(self, position: int, rng: Rng) -> int:
        """Draw the length of a turn; answers to the same task share a part of what they are drawn from."""
        shared = self._correlation
        if not shared:
            return self._response(rng)
        prompt = make_rng(self._seed, "length", position).gauss(0.0, 1.0)
        return self._at_score(math.sqrt(shared) * prompt + math.sqrt(1.0 - shared) * rng.gauss(0.0, 1.0))

    def make_prompt(self, task: Task) -> RepeatedValue:
        """Return the prompt of a task that came without one; the same for every episode of its position."""
        return RepeatedValue(0, self.prompt(make_rng(self._seed, "prompt", task.position)))


class SimulatedEnvironment:
    """One episode."""

    __slots__ = ("_position", "_rng", "_shared", "_slow_factor", "_turns_left")

    def __init__(self, shared: SimulatedEnvironments, position: int, rng: Rng) -> None:
        self._shared, self._position = shared, position
        self._rng = rng
        self._turns_left = 0
        self._slow_factor = 1.0

    async def reset(self, task: Task) -> Observation:
        shared, rng = self._shared, self._rng
        self._turns_left = shared.turns(rng)
        if shared.cost.slow_probability and rng.random() < shared.cost.slow_probability:
            self._slow_factor = shared.cost.slow_factor
        await shared.health.deliver(EnvironmentFailed)
        await shared.health.spend(shared.reset_s(rng) * self._slow_factor, EnvironmentFailed)
        length = shared.draw_response(self._position, rng)
        return Observation(tokens=task.prompt or shared.make_prompt(task), hint=length)

    async def step(self, generation: Generation) -> Observation:
        shared, rng, cost = self._shared, self._rng, self._shared.cost
        seconds = shared.step_s(rng) * self._slow_factor
        if cost.hang_probability and rng.random() < cost.hang_probability:
            await asyncio.get_running_loop().create_future()
        fails = cost.failure_probability and rng.random() < cost.failure_probability
        await shared.health.deliver(EnvironmentFailed)
        await shared.health.spend(seconds, EnvironmentFailed)
        if fails:
            raise EnvironmentFailed(f"a simulated step failed with {self._turns_left} turns to go")
        self._turns_left -= 1
        if self._turns_left <= 0:
            return Observation(done=True, reward=float(rng.random() < 0.5))
        return Observation(hint=shared.draw_response(self._position, rng))

    async def close(self) -> None: ...


_EASIEST, _HARDEST = 0.7, 0.3
_RIGHT = Score(value=1.0)
_WRONG = Score(value=0.0)


class SimulatedReward:
    """Scores an episode after a while. Faults call it `reward`."""

    def __init__(
        self, cost: costs.SimulatedRewardConfig | None = None, *, seed: int = 0, health: BackendHealth | None = None
    ) -> None:
        self._cost = cost or costs.SimulatedRewardConfig()
        self._latency_s = make_sampler(self._cost.latency_s, key="simulation.reward.latency_s")
        self._seed = seed
        self._health = health or BackendHealth("reward")
        self._probabilities: dict[int, float] = {}
        self._failures: dict[str, int] = {}
        """How often scoring each sample has failed; the next attempt draws again."""

    async def score(self, episode: Episode) -> Score:
        cost, name = self._cost, episode.sample_id
        rng = make_rng(self._seed, "reward", name)
        score = _RIGHT if rng.random() < self.success_probability(episode.task.position) else _WRONG
        await self._health.deliver(RewardError)
        await self._health.spend(self._latency_s(rng), RewardError)
        if cost.failure_probability:
            failures = self._failures.get(name, 0)
            if make_rng(self._seed, "reward failure", name, failures).random() < cost.failure_probability:
                self._failures[name] = failures + 1
                raise RewardError(f"a simulated verdict on {name} failed")
        return score

    def success_probability(self, position: int) -> float:
        """Return the probability that a sample of this position is right; 0 or 1 if all members are to be equal."""
        if position not in self._probabilities:
            rng = make_rng(self._seed, "difficulty", position)
            equal, luck = rng.random() < self._cost.zero_variance_share, rng.random()
            mixed = _HARDEST + (_EASIEST - _HARDEST) * luck
            self._probabilities[position] = float(luck < 0.5) if equal else mixed
        return self._probabilities[position]
