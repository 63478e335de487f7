"""What every environment, and every reward, must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import pytest

from headway.environments.base import Environment
from headway.errors import EnvironmentFailed, RewardError
from headway.rewards.base import Reward
from headway.types import Episode, Generation, Task, Turn


class EnvironmentContract(ABC):
    """Subclass, fill in the factory, and name the class `Test…`."""

    MOST_TURNS = 100

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None: ...

    @abstractmethod
    def make(self, task: Task) -> Environment: ...

    @abstractmethod
    def task(self) -> Task: ...

    @abstractmethod
    def generation(self) -> Generation:
        """Some answer a policy could give."""

    @abstractmethod
    def failing(self, task: Task) -> Environment | None:
        """One whose first step fails, where that can be arranged."""

    def test_an_episode_begins_with_something_to_see_and_ends(self) -> None:
        async def scenario() -> None:
            task = self.task()
            environment = self.make(task)
            first = await environment.reset(task)
            assert len(first.tokens) > 0 and not first.done
            for _ in range(self.MOST_TURNS):
                if (await environment.step(self.generation())).done:
                    break
            else:
                pytest.fail(f"no end after {self.MOST_TURNS} turns")
            await environment.close()

        self.run(scenario())

    def test_an_episode_given_up_can_be_closed(self) -> None:
        async def scenario() -> None:
            task = self.task()
            await self.make(task).close()
            environment = self.make(task)
            await environment.reset(task)
            await environment.close()

        self.run(scenario())

    def test_a_failure_says_so_and_can_be_closed(self) -> None:
        async def scenario() -> None:
            task = self.task()
            environment = self.failing(task)
            if environment is None:
                return
            await environment.reset(task)
            with pytest.raises(EnvironmentFailed):
                await environment.step(self.generation())
            await environment.close()

        self.run(scenario())


class RewardContract(ABC):
    """Subclass, fill in the factory, and name the class `Test…`."""

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None: ...

    @abstractmethod
    def make(self) -> Reward: ...

    @abstractmethod
    def failing(self) -> Reward | None:
        """One that cannot give a verdict, where that can be arranged."""

    @abstractmethod
    def generation(self) -> Generation: ...

    def episode(self, sample_id: str = "0.0.0") -> Episode:
        turn = Turn(observation=(), generation=self.generation())
        return Episode(sample_id=sample_id, task=Task(position=0), turns=(turn,))

    def test_the_same_episode_gets_the_same_score(self) -> None:
        async def scenario() -> None:
            reward = self.make()
            first = await reward.score(self.episode())
            assert first == await reward.score(self.episode())
            assert isinstance(first.value, float)

        self.run(scenario())

    def test_no_verdict_is_an_error_and_not_a_zero(self) -> None:
        async def scenario() -> None:
            reward = self.failing()
            if reward is None:
                return
            with pytest.raises(RewardError):
                await reward.score(self.episode())

        self.run(scenario())
