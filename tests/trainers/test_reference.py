"""The trainer computes what the single-file reference computes, and a model really learns with it."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.losses import LossSettings
from headway.algorithms.objective import PolicyObjective
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.types import Batch, Episode, FinishReason, Generation, Sample, SampleGroup, Score, Task, Turn, VersionRun
from headway.weights.host_transports import InProcessTransport
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import WeightStore

FILE = Path(__file__).parents[2] / "examples" / "reference_grpo.py"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_grpo", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_grpo"] = module
    spec.loader.exec_module(module)
    return module


def sample_of(name: str, answer: Any, version: int) -> Sample:
    count = len(answer.tokens)
    generation = Generation(
        actions=answer.tokens,
        logps=answer.logps,
        runs=(VersionRun(version=version, count=count),),
        finish=FinishReason.STOP,
    )
    episode = Episode(
        sample_id=name, task=Task(position=0), turns=(Turn(observation=answer.prompt, generation=generation),)
    )
    score = Score(value=answer.reward)
    return Sample(sample_id=name, episode=episode, oldest=version, newest=version, actions=count, score=score)


def batch_of(groups: list[list[Any]], trained: int) -> Batch:
    made = []
    for number, group in enumerate(groups):
        samples = tuple(sample_of(f"{number}.{index}.0", one, trained) for index, one in enumerate(group))
        made.append(SampleGroup(group_id=number, task=Task(position=number), samples=samples))
    return Batch(trained=trained, groups=tuple(made))


def settings(options: Any, **changes: Any) -> LocalSettings:
    usual = {
        "objective": PolicyObjective(
            pg_variant="ppo", settings=LossSettings(clip_low=options.clip, clip_high=options.clip), mode="token-mean"
        ),
        "advantages": AdvantageSettings(adv_estimator="grpo"),
        "optimizer": OptimizerSettings(learning_rate=options.learning_rate, max_grad_norm=options.max_grad_norm),
    }
    return LocalSettings(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("stale", [False, True], ids=["on-policy", "two steps old"])
def test_losses_and_weights_are_those_of_the_reference(reference: ModuleType, stale: bool) -> None:
    """In float64, over several steps; also with answers that older weights gave, where ratios are not 1."""

    async def scenario() -> None:
        options = reference.Options(prompts_per_step=4, group_size=6, answer_length=4, temperature=0.7)
        model = reference.tiny_model(options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
        generator = torch.Generator().manual_seed(1)
        store = WeightStore(wire_dtype=None)
        chosen = settings(options, precision="fp64", micro_batch_tokens=50, temperature=options.temperature)
        trainer = LocalTrainer(lambda: reference.tiny_model(options), chosen, store)
        queue: list[list[list[Any]]] = []
        for step in range(8):
            prompts = reference.make_prompts(options, generator)
            queue.append([reference.sample_group(model, prompt, options, generator) for prompt in prompts])
            if stale and len(queue) < 3:
                continue
            groups, trained = queue.pop(0), trainer.version
            loss, norm = reference.train_step(model, optimizer, groups, options)
            metrics = await trainer.train(batch_of(groups, trained))
            assert metrics["loss"] == pytest.approx(loss, rel=1e-9, abs=1e-12), step
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-9)
            assert (abs(metrics["ratio_max"] - 1) > 1e-3) is (stale and trained > 0)
        weights = trainer.learner.policy.weights()
        for name, wanted in model.named_parameters():
            torch.testing.assert_close(weights[name], wanted.data, rtol=1e-8, atol=1e-10)

    asyncio.run(scenario())


class Sampler:
    """A second copy of the model that answers with the weights it was last given."""

    def __init__(self, reference: ModuleType, options: Any) -> None:
        self.reference, self.options = reference, options
        self.model = reference.tiny_model(options).float().eval()
        self.receiver = DoubleBufferedReceiver(self.switch, dtype=torch.float32)
        self.generator = torch.Generator().manual_seed(5)

    async def switch(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        for name, one in self.model.named_parameters():
            one.data = tensors[name]

    @torch.no_grad()
    def answers(self) -> list[list[Any]]:
        """As `sample_group`, all prompts at once."""
        options, size = self.options, self.options.group_size
        prompts = self.reference.make_prompts(options, self.generator)
        ids = torch.tensor([prompt for prompt in prompts for _ in range(size)])
        logps = []
        for _ in range(options.answer_length):
            logp = self.model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(logp.exp(), 1, generator=self.generator)
            logps.append(logp.gather(1, drawn))
            ids = torch.cat([ids, drawn], dim=1)
        made, behaviour = ids[:, 2:].tolist(), torch.cat(logps, dim=1).tolist()
        flat = [
            self.reference.Answer(
                prompt=prompts[row // size],
                tokens=made[row],
                logps=behaviour[row],
                reward=self.reference.reward_of(prompts[row // size], made[row], options),
            )
            for row in range(len(made))
        ]
        return [flat[start : start + size] for start in range(0, len(flat), size)]


async def push(trainer: LocalTrainer, receiver: DoubleBufferedReceiver) -> None:
    manifest, buckets = await trainer.source.gather(trainer.version)
    await receiver.begin(manifest)
    async for bucket in buckets:
        await receiver.load(await InProcessTransport().send(bucket, receiver))
    await receiver.flip()


def test_a_character_model_learns_a_task_through_train_gather_load_flip_and_sample(reference: ModuleType) -> None:
    async def scenario() -> list[float]:
        options = reference.Options(prompts_per_step=16, group_size=8, learning_rate=3e-3)
        trainer = LocalTrainer(
            lambda: reference.tiny_model(options).float(),
            settings(options, micro_batch_tokens=4096, gradient_checkpointing=False),
            WeightStore(bucket_mb=0.1),
        )
        sampler = Sampler(reference, options)
        began, rewards = time.process_time(), []
        while len(rewards) < 120 and time.process_time() - began < 20:
            await push(trainer, sampler.receiver)
            groups = sampler.answers()
            await trainer.train(batch_of(groups, trainer.version))
            rewards.append(sum(one.reward for group in groups for one in group) / (16 * 8))
            if sum(rewards[-5:]) / 5 > 0.85:
                break
        assert trainer.version == sampler.receiver.version + 1 == len(rewards)
        return rewards

    rewards = asyncio.run(scenario())
    assert sum(rewards[:5]) / 5 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.7, [round(reward, 2) for reward in rewards]
