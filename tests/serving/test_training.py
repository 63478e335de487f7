"""An agent that knows nothing of Headway, trained through the endpoint for a few steps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.flow.backends import Backends, RunContext
from headway.flow.training_flow import AsyncTrainingFlow, RunSummary
from headway.launch.components import LaunchContext
from headway.launch.environment_pool import make_chat_template
from headway.launch.language_components import LanguageModelFamily
from headway.ledger import Ledger
from headway.models.tiny_model import make_tiny_model
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.placement.placement import plan_placement
from headway.rewards.base import EpisodeReturn
from headway.serving.agent_environment import AgentEndpoint, AgentEnvironmentFactory
from headway.serving.agent_launch import make_agent_launcher
from headway.settings import make_run_settings
from headway.types import Batch, Episode, Task

AGENT = Path(__file__).parents[2] / "examples" / "openai_agent.py"
STEPS = 3
WORDS = {
    "seed": 3,
    "async_generation_ratio": 1,
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 4,
    "prompt_length": 48,
    "response_length": 48,
    "max_steps": STEPS,
    "filter_zero_variance": "false",
    "processes": "false",
    "actor_train.model_args.disable_gradient_checkpointing": "true",
    "actor_train.training_args.learning_rate": 1e-3,
    "actor_train.training_args.per_device_train_batch_size": 16,
}


class Seeds:
    """Tasks that are nothing but a seed."""

    def __len__(self) -> int:
        return 1000

    def task(self, position: int) -> Task:
        return Task(position=position, data={"seed": position})

    def fingerprint(self) -> str:
        return "seeds"


async def train(
    model: Path, directory: Path, events: list[LoggedEvent], batches: list[Batch], **changed: Any
) -> RunSummary:
    words = {**WORDS, "pretrain": model, "output_dir": directory, **changed}
    resolved = load_config(None, [f"{key}={value}" for key, value in words.items()])
    family = LanguageModelFamily()
    policy = family.find_policy(resolved)
    context = LaunchContext(resolved=resolved, policy=policy, placement=plan_placement(resolved))
    components = family.make_training_components(context)
    endpoint = AgentEndpoint(make_chat_template(policy), model=policy.path.name)
    agents = AgentEnvironmentFactory(
        launch=make_agent_launcher({"agent": f"{AGENT}:solve"}),
        endpoint=endpoint,
        context_tokens=resolved.derived.sequence_length,
    )
    backends = Backends(
        trainer=components.trainer,
        engines=components.engines,
        transport=components.transport,
        tasks=Seeds(),
        environments=agents,
        reward=EpisodeReturn(),
    )
    clock = asyncio.get_running_loop().time
    flow = AsyncTrainingFlow(
        trainer=RunContext(
            backends=backends,
            settings=make_run_settings(resolved),
            events=EventLog(clock, events.append),
            run_dir=directory,
            clock=clock,
            on_trained=lambda batch, trained: batches.append(batch),
        )
    )
    try:
        await components.start()
        return await flow.run()
    finally:
        await endpoint.close()
        await components.close()


def test_an_agent_that_knows_nothing_of_headway_is_trained(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", steps=20)
    events: list[LoggedEvent] = []
    batches: list[Batch] = []
    summary = asyncio.run(train(tmp_path / "model", tmp_path / "run", events, batches))
    assert summary.finished and summary.trained == STEPS, summary
    episodes = [sample.episode for batch in batches for group in batch.groups for sample in group.samples]
    assert len(episodes) == 4 * 4 * STEPS
    assert 2 in {len(episode.turns) for episode in episodes} <= {1, 2}
    assert max(run.version for episode in episodes for run in episode.runs) >= 1, "all by the first policy"
    assert len({_worth(episode) for episode in episodes}) > 1
    ends = [event.data for event in events if event.kind == "step.end"]
    assert ends[0]["train/behaviour_kl"] < 1e-6, "the trainer sees other contexts than the engine saw"
    assert ends[0]["train/grad_norm"] > 0
    assert not [event for event in events if event.kind == "error"]
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    try:
        assert ledger.audit() == []
    finally:
        ledger.close()


def _worth(episode: Episode) -> float:
    return sum(turn.reward for turn in episode.turns)


def test_the_reward_of_a_wrong_answer_is_how_close_it_was() -> None:
    from headway.environments.environment_registry import find_environment_class

    module = __import__("sys").modules[find_environment_class(f"{AGENT}:solve").__module__]
    assert [module._close(said, 7) for said in ("7", "8", "x", "")] == [1.0, 0.5, 0.0, 0.0]
    assert pytest.approx(module._close("17", 7)) == 1 / 11
