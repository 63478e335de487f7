"""From a configuration to environments and their starting states."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headway.config import ResolvedConfig, load_config
from headway.environments.local_host import LocalEnvironmentHost
from headway.environments.text_episode import SEED_KEY, TextEpisode
from headway.environments.worker_host import WorkerEnvironmentHost
from headway.errors import ConfigError
from headway.launch.environment_pool import (
    AgentEnvironmentPool,
    EnvironmentSpec,
    SingleTurnPool,
    make_environment_pool,
    make_environment_specs,
    make_episode_sources,
)
from headway.models.policy_info import PolicyInfo
from tests.environments.letter_tokenizer import LetterTokenizer
from tests.environments.test_text_episode import said

GUESS = "tests.environments.sample_environments:Guess"
POLICY = PolicyInfo(path=Path("letters"), critic=None, tokenizer=LetterTokenizer(), parameters=1, positions=300)


def resolved(**changed: Any) -> ResolvedConfig:
    tree: dict[str, Any] = {
        "rollout_batch_size": 8,
        "sequence_length": 400,
        "train_env_manager": {"tags": ["easy", "hard"], "group_size": 2, "num_groups_partition": [3, 1]},
        "custom_envs": {
            "easy": {"env_type": GUESS, "env_config": {"most": 1}},
            "hard": {"env_type": GUESS, "max_steps": 2, "max_tokens_per_step": 3},
        },
    }
    return load_config(tree, {"train_env_manager.num_env_groups": 4, **changed})


def by_tag(specs: list[EnvironmentSpec]) -> dict[str, EnvironmentSpec]:
    return {spec.tag: spec for spec in specs}


def test_tags_have_their_shares_of_the_groups_and_of_the_tasks() -> None:
    config = resolved(**{"train_env_manager.group_size_redundancy": 1, "max_additional_running_prompts": 1})
    specs = by_tag(make_environment_specs(config))
    assert {tag: (spec.share, spec.max_episodes) for tag, spec in specs.items()} == {"easy": (3, 12), "hard": (1, 6)}
    source = make_episode_sources(config, POLICY).train
    tasks = [source.task(position) for position in range(400)]
    assert Counter(task.domain for task in tasks if task) == {"easy": 300, "hard": 100}


def test_held_out_starts_are_others_and_end() -> None:
    sources = make_episode_sources(resolved(val_batch_size=6), POLICY)
    assert sources.validation is not None and len(sources.validation) == 6
    held_out = [sources.validation.task(position) for position in range(6)]
    train = {sources.train.task(position).data[SEED_KEY] for position in range(200)}  # type: ignore[union-attr]
    assert all(task is not None and task.data[SEED_KEY] not in train for task in held_out)
    assert sources.validation.task(1000) is None


def test_what_an_environment_is_made_of_is_told_apart_how_it_is_run_is_not() -> None:
    first = make_episode_sources(resolved(), POLICY).train.fingerprint()
    assert first == make_episode_sources(resolved(**{"custom_envs.easy.workers": 3}), POLICY).train.fingerprint()
    for other in ({"custom_envs.easy.env_config.most": 2}, {"seed": 1}, {"custom_envs.hard.env_type": "frozen_lake"}):
        assert first != make_episode_sources(resolved(**other), POLICY).train.fingerprint()


def test_an_environment_by_its_name_alone_and_all_of_them_without_tags() -> None:
    pytest.importorskip("gymnasium")
    bare = load_config({"train_env_manager": {"tags": ["frozen_lake"], "group_size": 2}, "rollout_batch_size": 2})
    assert [spec.name for spec in make_environment_specs(bare)] == ["frozen_lake"]
    every = resolved(**{"train_env_manager.tags": [], "train_env_manager.num_groups_partition": []})
    assert [spec.tag for spec in make_environment_specs(every)] == ["easy", "hard"]
    with pytest.raises(ConfigError, match="which environments"):
        make_environment_specs(load_config({"train_env_manager": {"group_size": 2}, "rollout_batch_size": 2}))


def test_a_run_without_environments_answers_once() -> None:
    assert isinstance(make_environment_pool(load_config(), POLICY), SingleTurnPool)


async def played(pool: AgentEnvironmentPool, source: Any, position: int, most: list[int]) -> Any:
    task = source.task(position)
    episode = pool(task)
    assert isinstance(episode, TextEpisode)
    await episode.enter()
    most[0] += 1
    most[1] = max(most)
    try:
        seen = await episode.reset(task)
        while not seen.done:
            seen = await episode.step(said(str(task.data[SEED_KEY] % 2)))
    finally:
        most[0] -= 1
        await episode.close()
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_episodes_are_played_within_their_limits(workers: int) -> None:
    limits = {"custom_envs.easy.workers": workers, "custom_envs.hard.concurrency": 1}

    async def scenario() -> tuple[list[Any], int]:
        config = resolved(**limits)
        pool, source, most = make_environment_pool(config, POLICY), make_episode_sources(config, POLICY).train, [0, 0]
        assert isinstance(pool, AgentEnvironmentPool)
        try:
            return await asyncio.gather(*(played(pool, source, place, most) for place in range(24))), most[1]
        finally:
            await pool.close()

    ends, most = asyncio.run(scenario())
    assert most <= (6 if workers == 0 else 2) + 1
    won = [end for end in ends if end.info["success"]]
    assert len(won) >= 18 and all(end.reward == 1.0 for end in won)
    assert all(end.truncated and end.info["turns"] == 2 for end in ends if not end.info["success"])


def test_a_thousand_episodes_at_once() -> None:
    many = {"train_env_manager.num_env_groups": 500, "train_env_manager.num_groups_partition": [499, 1]}

    async def scenario() -> tuple[list[Any], int]:
        config = resolved(**many, rollout_batch_size=1000)
        pool, most = make_environment_pool(config, POLICY), [0, 0]
        assert isinstance(pool, AgentEnvironmentPool)
        train = make_episode_sources(config, POLICY).train
        easy = [place for place in range(1100) if train.task(place).domain == "easy"][:998]  # type: ignore[union-attr]
        try:
            return await asyncio.gather(*(played(pool, train, place, most) for place in easy)), most[1]
        finally:
            await pool.close()

    ends, most = asyncio.run(scenario())
    assert most == len(ends) == 998 and all(end.info["success"] for end in ends)


def test_environments_go_into_as_many_workers_as_they_ask_for() -> None:
    async def hosts(**changed: Any) -> dict[str, Any]:
        pool = make_environment_pool(resolved(**changed), POLICY)
        assert isinstance(pool, AgentEnvironmentPool)
        await pool.close()
        return pool.hosts

    here = asyncio.run(hosts(**{"custom_envs.easy.workers": 0, "custom_envs.hard.env_type": "frozen_lake"}))
    assert {type(host) for host in here.values()} == {LocalEnvironmentHost}, "as asked, and because it is our own"
    theirs = asyncio.run(hosts())
    assert {type(host) for host in theirs.values()} == {WorkerEnvironmentHost}
    assert theirs["easy"].max_episodes >= 6 and theirs["hard"].max_episodes == 2
    filled = asyncio.run(hosts(**{"train_env_manager.max_env_num_per_worker": 4}))
    assert [host.max_episodes for host in filled.values()] == [8, 4], "6 episodes in 2 workers of 4, 2 in one"
    asked = asyncio.run(hosts(**{"custom_envs.easy.workers": 3, "custom_envs.hard.concurrency": 2}))
    assert asked["easy"].max_episodes == 3 and asked["hard"].max_episodes == 2


def test_variables_for_the_chat_template_reach_episodes_those_of_validation_too() -> None:
    train, held_out = "actor_train.data_args.chat_template_kwargs", "validation.data_args.chat_template_kwargs"

    async def opened(*, held: bool, **changed: Any) -> str:
        pool, sources = (
            make_environment_pool(resolved(**changed), POLICY),
            make_episode_sources(resolved(**changed), POLICY),
        )
        task = (sources.validation if held else sources.train).task(0)  # type: ignore[union-attr]
        assert task is not None
        environment = pool(task)
        try:
            return str(POLICY.tokenizer.decode(list((await environment.reset(task)).tokens)))
        finally:
            await environment.close()
            await pool.close()

    polite = {f"{train}.polite": True}
    assert "please" not in asyncio.run(opened(held=False))
    assert " please</s>" in asyncio.run(opened(held=False, **polite))
    assert " please</s>" in asyncio.run(opened(held=True, **polite))
    assert "please" not in asyncio.run(opened(held=True, **polite, **{f"{held_out}.polite": False}))
    for key in (train, held_out):
        with pytest.raises(ConfigError, match="chat template of letters fails"):
            make_episode_sources(resolved(**{f"{key}.tokenize": True}), POLICY)
