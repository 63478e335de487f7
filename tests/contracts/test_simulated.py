"""The simulated back ends meet every contract."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from headway.config import simulation_config as costs
from headway.engines.base import Engine, Progress, Request
from headway.environments.base import Environment
from headway.rewards.base import Reward
from headway.sim import virtual_clock
from headway.sim.fault_injection import BackendHealth
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.simulated_environment import SimulatedEnvironments, SimulatedReward
from headway.sim.simulated_trainer import SimulatedTrainer
from headway.sim.simulated_weights import SimulatedSource, SimulatedTransport
from headway.trainers.base import Trainer
from headway.types import (
    Batch,
    Episode,
    FinishReason,
    Generation,
    RepeatedValue,
    Sample,
    SampleGroup,
    SamplingParams,
    Task,
    VersionRun,
)
from headway.weights.base import Bucket, WeightReceiver, WeightSource, WeightTransport

from .engine_contract import EngineContract
from .environment_contract import EnvironmentContract, RewardContract
from .trainer_contract import TrainerContract
from .weights_contract import WeightsContract

WEIGHTS = costs.SimulatedWeightsConfig(gather_s=0.01, send_s=0.01, load_s=0.01, flip_s=0.02)


def generation(count: int = 5) -> Generation:
    return Generation(
        actions=RepeatedValue(0, count),
        logps=RepeatedValue(-1.0, count),
        runs=(VersionRun(version=0, count=count),),
        finish=FinishReason.STOP,
    )


class Virtual:
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        virtual_clock.run_on_virtual_clock(scenario, max_events=100_000)


class TestSimulatedEngine(Virtual, EngineContract):
    COST = costs.SimulatedEngineConfig(slots=4, step_s=0.01, step_per_context_token_s=1e-6, kv_tokens=400)

    def make(self, name: str = "engine/0") -> Engine:
        self.healths = getattr(self, "healths", {})
        self.healths[name] = BackendHealth(name)
        return SimulatedEngine(name, self.COST, WEIGHTS, health=self.healths[name])

    async def serve(self, engine: Engine, version: int) -> None:
        source = SimulatedSource(WEIGHTS)
        source.publish(version)
        manifest, buckets = await source.gather(version)
        await engine.receiver.begin(manifest)
        async for bucket in buckets:
            await engine.receiver.load(bucket)
        await engine.receiver.flip()

    def request(self, name: str = "a") -> Request:
        return Request(
            request_id=name, session=name, prompt=RepeatedValue(0, 100), params=SamplingParams(), hint=self.LENGTH
        )

    async def midway(self, engine: Engine, progress: Progress) -> None:
        await asyncio.sleep(0.123)

    async def crash(self, engine: Engine) -> None:
        self.healths[engine.name].begin(costs.FaultConfig(kind="crash", target=engine.name))


class TestSimulatedWeights(Virtual, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        source = SimulatedSource(WEIGHTS)
        source.publish(1)
        source.publish(2)
        return source, SimulatedTransport(WEIGHTS), SimulatedEngine("engine/0", weights=WEIGHTS).receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload="rubbish")


class TestSimulatedTrainer(Virtual, TrainerContract):
    def make(self) -> Trainer:
        self.health = BackendHealth("trainer")
        return SimulatedTrainer(costs.SimulatedTrainerConfig(gpu_s_per_token=0.1), gpus=2, health=self.health)

    def batch(self, trained: int) -> Batch:
        task = Task(position=trained)
        episode = Episode(sample_id=f"{trained}.0.0", task=task, turns=())
        sample = Sample(sample_id=episode.sample_id, episode=episode, oldest=0, newest=0, actions=5)
        return Batch(trained=trained, groups=(SampleGroup(group_id=trained, task=task, samples=(sample,)),))

    async def crash(self, trainer: Trainer) -> None:
        self.health.begin(costs.FaultConfig(kind="crash", target="trainer"))

    def contents(self, trainer: Trainer) -> object:
        assert isinstance(trainer, SimulatedTrainer)
        return trainer.lineage


class TestSimulatedEnvironment(Virtual, EnvironmentContract):
    WORLD = costs.SimulatedEnvironmentConfig(
        turns=costs.DistributionConfig(mean=4), step_s=costs.DistributionConfig(kind="gaussian", mean=2.0, std=1.0)
    )

    def make(self, task: Task) -> Environment:
        return SimulatedEnvironments(costs.SimulationConfig(environment=self.WORLD))(task)

    def task(self) -> Task:
        return Task(position=3)

    def generation(self) -> Generation:
        return generation()

    def failing(self, task: Task) -> Environment:
        world = replace(self.WORLD, failure_probability=1.0)
        return SimulatedEnvironments(costs.SimulationConfig(environment=world))(task)


class TestSimulatedReward(Virtual, RewardContract):
    def make(self) -> Reward:
        return SimulatedReward(costs.SimulatedRewardConfig(latency_s=costs.DistributionConfig(mean=1.0)))

    def failing(self) -> Reward:
        return SimulatedReward(costs.SimulatedRewardConfig(failure_probability=1.0))

    def generation(self) -> Generation:
        return generation()
