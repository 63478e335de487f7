"""The whole flow on real parts, at a headway of zero, is the single-file reference step by step.

Trainer (float64), engines (float32), weight updates, rewards and scheduler are those of a real run, all in this
process. What the flow trained is written down and given to the reference's own update, from the same first weights.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.losses import LossSettings
from headway.algorithms.objective import PolicyObjective
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings
from headway.flow.backends import Backends, RunContext
from headway.flow.training_flow import AsyncTrainingFlow
from headway.launch.environment_pool import SingleTurnPool
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.rewards.user_function import FunctionReward, load_function
from headway.settings import RunSettings
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.types import Batch, Sample, SamplingParams, Task, VersionRun
from headway.weights.host_transports import InProcessTransport
from headway.weights.weight_store import WeightStore
from tests.flow.factory import audit

torch.set_num_threads(1)

FILE = Path(__file__).parents[2] / "examples" / "reference_grpo.py"
EXACT = 1e-9
"""Between two ways to compute the same in float64, relative; weights also absolute."""
ROUNDED = 1e-4
"""Between log-probabilities of an engine in float32 and of the reference in float64."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the flow, and the same one done by the reference."""

    batch: Batch
    metrics: Mapping[str, float]
    """As the flow reported them."""
    answers: list[list[Any]]
    """The samples of `batch` as the reference sees them, judged by itself."""
    loss: float
    grad_norm: float
    logps: list[list[Tensor]]
    """Of every answer, by a full forward of the reference before its update."""
    later_logps: list[list[Tensor]]
    """The same after it: what would be seen if weights were a step off."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.batch.groups for sample in group.samples]


@dataclass(frozen=True, kw_only=True)
class Run:
    options: Any
    steps: list[Step]
    weights: dict[str, Tensor]
    """The flow's, after the last step."""
    reference_weights: dict[str, Tensor]
    directory: Path


# -- the task of the reference, as parts of a flow


class Letters:
    """The prompts that the reference would ask, in its order; as many as the steps need."""

    def __init__(self, reference: ModuleType, options: Any) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        steps = [reference.make_prompts(options, generator) for _ in range(options.steps)]
        self.prompts = [prompt for step in steps for prompt in step]

    def task(self, position: int) -> Task | None:
        if position >= len(self.prompts):
            return None
        return Task(position=position, prompt=self.prompts[position], data={"prompt": self.prompts[position]})


def decode(actions: Sequence[int]) -> str:
    return " ".join(str(action) for action in actions)


def judge_of(reference: ModuleType, options: Any) -> FunctionReward:
    def right_letters(text: str, data: Mapping[str, Any]) -> float:
        found: float = reference.reward_of(data["prompt"], [int(token) for token in text.split()], options)
        return found

    return FunctionReward(load_function(right_letters, "right_letters", {}, "answer"))


def trainer_of(reference: ModuleType, options: Any) -> LocalTrainer:
    settings = LocalSettings(
        objective=PolicyObjective(
            pg_variant="ppo", settings=LossSettings(clip_low=options.clip, clip_high=options.clip), mode="token-mean"
        ),
        advantages=AdvantageSettings(adv_estimator="grpo"),
        optimizer=OptimizerSettings(learning_rate=options.learning_rate, max_grad_norm=options.max_grad_norm),
        precision="fp64",
        temperature=options.temperature,
        micro_batch_tokens=50,
    )
    return LocalTrainer(
        lambda: reference.tiny_model(options), settings, WeightStore(bucket_mb=0.1, wire_dtype=torch.float32)
    )


def engine_of(reference: ModuleType, options: Any, name: str) -> NativeEngine:
    slot_tokens = 2 + options.answer_length
    settings = NativeSettings(slots=8, slot_tokens=slot_tokens, prefill_tokens=8, stream_tokens=1, seed=options.seed)
    return NativeEngine(name, lambda: reference.tiny_model(options).float(), settings, eos=[reference.END])


async def play(
    reference: ModuleType, options: Any, run_dir: Path
) -> tuple[list[Batch], list[LoggedEvent], dict[str, Tensor]]:
    """What was trained, what was told about it, and the weights that came of it."""
    trainer = trainer_of(reference, options)
    engines = [engine_of(reference, options, f"engine/{number}") for number in range(2)]
    batches, told = list[Batch](), list[LoggedEvent]()
    clock = asyncio.get_running_loop().time
    flow = AsyncTrainingFlow(
        trainer=RunContext(
            backends=Backends(
                trainer=trainer,
                engines=engines,
                transport=InProcessTransport(),
                tasks=Letters(reference, options),
                environments=SingleTurnPool(),
                reward=judge_of(reference, options),
                decode=decode,
                devices={"train": (0,), "generate": (1,)},
            ),
            settings=RunSettings(
                groups_per_step=options.prompts_per_step,
                group_size=options.group_size,
                max_steps=options.steps,
                async_generation_ratio=0.0,
                filter_zero_variance=False,
                save_steps=0,
                eval_steps=0,
                sampling=SamplingParams(max_new_tokens=options.answer_length, temperature=options.temperature),
                seed=options.seed,
            ),
            events=EventLog(clock, told.append),
            run_dir=run_dir,
            clock=clock,
            on_trained=lambda batch, trained: batches.append(batch),
        )
    )
    try:
        summary = await flow.run()
        assert summary.finished and summary.trained == options.steps, summary
        assert [engine.receiver.version for engine in engines] == [options.steps] * 2
        return batches, told, {name: one.clone() for name, one in trainer.learner.policy.weights().items()}
    finally:
        for engine in engines:
            await engine.close()
        await trainer.close()


# -- the same by the reference


def answer_of(reference: ModuleType, sample: Sample, options: Any) -> Any:
    (turn,) = sample.episode.turns
    prompt, tokens = list(turn.observation), list(turn.generation.actions)
    reward = reference.reward_of(prompt, tokens, options)
    return reference.Answer(prompt=prompt, tokens=tokens, logps=list(turn.generation.logps), reward=reward)


@torch.no_grad()
def logps_of(reference: ModuleType, model: Any, groups: list[list[Any]], options: Any) -> list[list[Tensor]]:
    return [reference.group_logps(model, group, options) for group in groups]


def follow(
    reference: ModuleType, options: Any, batches: list[Batch], told: list[LoggedEvent]
) -> tuple[list[Step], dict[str, Tensor]]:
    """Every step of the flow done again by the reference, which starts where the flow started and never looks back."""
    model = reference.tiny_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    ends = [event for event in told if event.kind == "step.end"]
    steps = []
    for batch, end in zip(batches, ends, strict=True):
        groups = [[answer_of(reference, sample, options) for sample in group.samples] for group in batch.groups]
        before = logps_of(reference, model, groups, options)
        loss, grad_norm = reference.train_step(model, optimizer, groups, options)
        steps.append(
            Step(
                batch=batch,
                metrics={key.removeprefix("train/"): value for key, value in end.data.items()},
                answers=groups,
                loss=loss,
                grad_norm=grad_norm,
                logps=before,
                later_logps=logps_of(reference, model, groups, options),
            )
        )
    return steps, {name: one.detach() for name, one in model.named_parameters()}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_grpo", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["reference_grpo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(reference: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = reference.Options(steps=8, prompts_per_step=4, group_size=6, answer_length=4, temperature=0.7)
    directory = tmp_path_factory.mktemp("run")
    batches, told, weights = asyncio.run(play(reference, options, directory))
    steps, reference_weights = follow(reference, options, batches, told)
    return Run(options=options, steps=steps, weights=weights, reference_weights=reference_weights, directory=directory)


# -- what must be equal


def test_every_prompt_was_trained_once_in_the_order_of_the_reference(reference: ModuleType, run: Run) -> None:
    asked = [list(group.task.prompt) for step in run.steps for group in step.batch.groups]
    by_step = [asked[at : at + 4] for at in range(0, len(asked), 4)]
    wanted = Letters(reference, run.options).prompts
    assert [sorted(step) for step in by_step] == [sorted(wanted[at : at + 4]) for at in range(0, len(wanted), 4)]
    assert audit(run.directory)["trained"] == sum(len(step.samples) for step in run.steps) == 8 * 4 * 6


def test_losses_and_metrics_of_every_step_are_those_of_the_reference(reference: ModuleType, run: Run) -> None:
    """Means over actions are over those that teach: an answer without advantage is not even looked at."""
    assert len(run.steps) == run.options.steps
    for number, step in enumerate(run.steps):
        answers = [answer for group in step.answers for answer in group]
        by_group = [reference.group_advantages([answer.reward for answer in group]) for group in step.answers]
        advantages = [advantage for group in by_group for advantage in group]
        logps = [logp for group in step.logps for logp in group]
        taught = [each for each in zip(answers, advantages, logps, strict=True) if each[1]]
        gap = torch.cat([torch.tensor(answer.logps, dtype=torch.float64) - logp for answer, _, logp in taught])
        wanted = {
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "reward": sum(answer.reward for answer in answers) / len(answers),
            "advantage_mean": sum(advantage * len(logp) for _, advantage, logp in taught) / len(gap),
            "behaviour_kl_k1": float(gap.mean()),
            "ratio_mean": float((-gap).exp().mean()),
            "ratio_max": float((-gap).exp().max()),
            "clip_fraction": 0.0,
            "lag_max": 0.0,
            "learning_rate": run.options.learning_rate,
            "actions": len(gap),
            "tokens": sum(len(answer.tokens) for answer in answers),
            "samples": len(answers),
            "skipped_samples": len(answers) - len(taught),
        }
        found = {name: step.metrics[name] for name in wanted}
        assert found == pytest.approx(wanted, rel=EXACT, abs=1e-12), number
    assert 0 < sum(step.metrics["skipped_samples"] for step in run.steps) < 8 * 4 * 6 / 2


def test_weights_after_the_last_step_are_those_of_the_reference(reference: ModuleType, run: Run) -> None:
    start = {name: one.detach() for name, one in reference.tiny_model(run.options).named_parameters()}
    assert run.weights.keys() == run.reference_weights.keys()
    for name, wanted in run.reference_weights.items():
        torch.testing.assert_close(run.weights[name], wanted, rtol=EXACT, atol=EXACT)
    assert max(float((run.weights[name] - start[name]).abs().max()) for name in start) > 1e-3


def test_engines_answered_with_the_weights_of_the_step(run: Run) -> None:
    """Their log-probabilities are those of a full forward; a step later the same forward says something else."""
    for number, step in enumerate(run.steps):
        answers = [answer for group in step.answers for answer in group]
        found = torch.tensor([logp for answer in answers for logp in answer.logps], dtype=torch.float64)
        now, later = (torch.cat([one for group in each for one in group]) for each in (step.logps, step.later_logps))
        assert float((found - now).abs().max()) < ROUNDED, number
        assert float((found - later).abs().max()) > 100 * ROUNDED, number


def test_every_sample_was_made_wholly_by_the_version_that_was_trained(run: Run) -> None:
    for number, step in enumerate(run.steps):
        assert step.batch.trained == number
        for sample in step.samples:
            assert sample.episode.runs == (VersionRun(version=number, count=sample.actions),)
            assert sample.oldest == sample.newest == number


def test_the_rewards_that_were_trained_are_those_that_the_reference_gives(run: Run) -> None:
    found = [sample.score.value for step in run.steps for sample in step.samples if sample.score is not None]
    assert found == [answer.reward for step in run.steps for group in step.answers for answer in group]
    assert len(set(found)) > 2
