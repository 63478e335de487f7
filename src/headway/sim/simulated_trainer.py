"""A simulated trainer and its scorers: steps cost time and leave a lineage instead of weights.

The *lineage* is a running digest of every sample id trained, in order. Checkpoints hold it and the checksums of a
version are made from it, so a test can tell exactly which samples a version was made of.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from hashlib import blake2b
from pathlib import Path

from headway.config import simulation_config as costs
from headway.errors import ScoringError, TrainerCrashed, TrainerError
from headway.sim.fault_injection import BackendHealth
from headway.sim.simulated_weights import SimulatedSource
from headway.types import Batch, RepeatedValue, SampleGroup
from headway.weights.base import WeightSource

_STATE_FILE = "trainer.json"
INITIAL_LINEAGE = "start"
"""Lineage of version 0."""


def extend_lineage(lineage: str, sample_ids: Iterable[str]) -> str:
    """Return the lineage after one more step on these samples."""
    text = "\n".join((lineage, *sample_ids))
    return blake2b(text.encode(), digest_size=16).hexdigest()


class SimulatedTrainer:
    """The policy being trained, on `gpus` devices. Faults call it `trainer`.

    `device` is held for the length of a step; scorers on the same devices are given the same lock. A restart brings
    version 0 back, as a real trainer comes back with the weights it was first given.
    """

    def __init__(
        self,
        cost: costs.SimulatedTrainerConfig | None = None,
        weights: costs.SimulatedWeightsConfig | None = None,
        *,
        gpus: int = 1,
        health: BackendHealth | None = None,
        device: asyncio.Lock | None = None,
    ) -> None:
        self._cost = cost or costs.SimulatedTrainerConfig()
        self._gpus = gpus
        self._health = health or BackendHealth("trainer")
        self._health.listen(self._on_health_change)
        self.device = device or asyncio.Lock()
        self._source = SimulatedSource(weights, health=self._health)
        self.source: WeightSource = self._source
        self._down = False
        self._set_version(0, INITIAL_LINEAGE, 0)

    def _set_version(self, version: int, lineage: str, samples: int) -> None:
        self.version = version
        self.lineage = lineage
        """Digest of every sample id trained so far, in order."""
        self.samples = samples
        """Number of samples trained so far."""
        self._source.clear()
        self._source.publish(version, lineage)

    def cost_s(self, actions: int, samples: int) -> float:
        """Return the seconds that a step on so many actions and samples takes."""
        cost = self._cost
        return (cost.gpu_s_per_token * actions + cost.gpu_s_per_sample * samples) / self._gpus + cost.fixed_s

    async def train(self, batch: Batch) -> Mapping[str, float]:
        self._check_up()
        if batch.trained != self.version:
            raise TrainerError(f"a batch for version {batch.trained}, the trainer is at {self.version}")
        samples = [sample for group in batch.groups for sample in group.samples]
        async with self.device:
            self._check_up()
            await self._health.deliver(TrainerError)
            await self._health.spend(self.cost_s(batch.actions, len(samples)), TrainerCrashed)
        if batch.trained != self.version:
            raise TrainerError(f"the trainer moved to version {self.version} while it trained {batch.trained}")
        self.version += 1
        self.lineage = extend_lineage(self.lineage, (sample.sample_id for sample in samples))
        self.samples += len(samples)
        self._source.publish(self.version, self.lineage)
        scores = [sample.score.value for sample in samples if sample.score is not None]
        reward = sum(scores) / len(scores) if scores else 0.0
        return {"samples": float(len(samples)), "tokens": float(batch.actions), "reward": reward}

    async def save(self, directory: Path) -> None:
        self._check_up()
        state = {"version": self.version, "lineage": self.lineage, "samples": self.samples}
        await self._health.spend(self._cost.save_s, TrainerCrashed)
        _write_state(directory, state)

    async def load(self, directory: Path) -> Sequence[str]:
        self._check_up()
        state = _read_state(directory)
        await self._health.spend(self._cost.save_s, TrainerCrashed)
        self._set_version(int(str(state["version"])), str(state["lineage"]), int(str(state["samples"])))
        return ()

    async def start(self) -> None:
        """Do nothing: it is up when it is made."""

    async def restart(self) -> None:
        self._go_down()
        await self._health.restart("the trainer", self._cost.restart_s, TrainerCrashed)
        self._down = False
        self._set_version(0, INITIAL_LINEAGE, 0)

    async def close(self) -> None:
        self._go_down()

    def _on_health_change(self, change: str) -> None:
        if change == "crash":
            self._go_down()

    def _go_down(self) -> None:
        self._down = True
        self._source.clear()

    def _check_up(self) -> None:
        if self._down:
            raise TrainerCrashed("the trainer is down")


class SimulatedScorer:
    """logp, ref_logp or critic: a forward pass over a group, one at a time. Faults call it by its name.

    With the trainer's `device` it and a training step exclude each other. A scorer without costs takes no turn.
    """

    def __init__(
        self,
        name: str,
        cost: costs.SimulatedScorerConfig | None = None,
        *,
        gpus: int = 1,
        health: BackendHealth | None = None,
        device: asyncio.Lock | None = None,
    ) -> None:
        self.name = name
        self._cost = cost or costs.SimulatedScorerConfig()
        self._gpus = gpus
        self._health = health or BackendHealth(name)
        self._device = device or asyncio.Lock()

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        seconds = self._cost.gpu_s_per_token * group.actions / self._gpus + self._cost.fixed_s
        turn: AbstractAsyncContextManager[None] = self._device if seconds > 0 else nullcontext()
        async with turn:
            await self._health.deliver(ScoringError)
            await self._health.spend(seconds, ScoringError)
        return [RepeatedValue(-1.0, sample.actions) for sample in group.samples]

    async def start(self) -> None:
        """Do nothing: it is up when it is made."""

    async def close(self) -> None:
        """Do nothing: it holds nothing."""


def _write_state(directory: Path, state: Mapping[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")


def _read_state(directory: Path) -> Mapping[str, object]:
    try:
        state = json.loads((directory / _STATE_FILE).read_text(encoding="utf-8"))
        return {key: state[key] for key in ("version", "lineage", "samples")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{directory} holds no checkpoint of this trainer: {error!r}") from error
