"""Simulated verdicts: 0 or 1, harder or easier by prompt.

A verdict depends only on the seed, the position and the sample's id. Prompts of the `zero_variance_share` give every
member the same; the others have a difficulty around one half, so that their groups nearly always vary.
"""

from __future__ import annotations

from headway.config import simulation as costs
from headway.errors import RewardError
from headway.seeding import seeded
from headway.sim.health import Health
from headway.sim.latency import sampler
from headway.types import Episode, Score

_EASIEST, _HARDEST = 0.7, 0.3
_RIGHT = Score(value=1.0)
_WRONG = Score(value=0.0)


class SimulatedReward:
    """Scores after a while. Target `reward` of the faults."""

    def __init__(
        self, cost: costs.SimulatedReward | None = None, *, seed: int = 0, health: Health | None = None
    ) -> None:
        self._cost = cost or costs.SimulatedReward()
        self._latency_s = sampler(self._cost.latency_s, key="simulation.reward.latency_s")
        self._seed = seed
        self._health = health or Health("reward")
        self._chances: dict[int, float] = {}
        self._failures: dict[str, int] = {}
        """How often each sample's scoring has failed: the next attempt has luck of its own."""

    async def score(self, episode: Episode) -> Score:
        cost, name = self._cost, episode.sample_id
        rng = seeded(self._seed, "reward", name)
        verdict = _RIGHT if rng.random() < self.chance(episode.task.position) else _WRONG
        await self._health.deliver(RewardError)
        await self._health.spend(self._latency_s(rng), RewardError)
        if cost.failure_probability:
            failures = self._failures.get(name, 0)
            if seeded(self._seed, "reward failure", name, failures).random() < cost.failure_probability:
                self._failures[name] = failures + 1
                raise RewardError(f"a simulated verdict on {name} failed")
        return verdict

    def chance(self, position: int) -> float:
        """That a sample of this position is right: 0 or 1 where all members are to be equal."""
        if position not in self._chances:
            self._chances[position] = self._drawn_chance(position)
        return self._chances[position]

    def _drawn_chance(self, position: int) -> float:
        rng = seeded(self._seed, "difficulty", position)
        equal, luck = rng.random() < self._cost.zero_variance_share, rng.random()
        if equal:
            return float(luck < 0.5)
        return _HARDEST + (_EASIEST - _HARDEST) * luck
