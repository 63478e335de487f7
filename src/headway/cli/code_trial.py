"""Tries code of users once, before a run: the reward on the first row, the first start of every environment.

Nothing of a run is started. A call that fails becomes a sentence; what can never work is a `ConfigError`: a reward that
returns no number, a first observation that leaves no room for an answer.
"""

from __future__ import annotations

import asyncio

from headway.data import SizedSource
from headway.environments.base import find_concurrency_limit
from headway.errors import ConfigError, EnvironmentFailed, EpisodeTooLong, RewardError
from headway.launch.environment_pool import OPENAI_AGENT, make_environment_pool, make_environment_specs
from headway.launch.training_session import PreparedRun
from headway.rewards.reward_registry import RewardTerm, RoutedReward, make_run_rewards, open_reward_workers
from headway.rewards.scoring_functions import NOT_A_NUMBER
from headway.rewards.user_reward_workers import WorkerReward
from headway.types import Episode, FinishReason, Generation, Task, Turn

_MOST_TASKS = 256
"""Tasks that are looked through for one of each domain."""
_TIMEOUT_S = 120.0


async def try_user_code(prepared: PreparedRun) -> list[str]:
    """Return what the first calls of users' rewards and of environments gave. Raises `ConfigError`."""
    pipeline = prepared.resolved.derived.pipeline
    if pipeline == "agentic":
        return await _try_environments(prepared)
    return [] if pipeline == "denoising" else await _try_rewards(prepared)


def _list_tasks(source: SizedSource) -> list[Task]:
    tasks = (source.task(position) for position in range(min(_MOST_TASKS, len(source))))
    return [task for task in tasks if task is not None]


async def _try_rewards(prepared: PreparedRun) -> list[str]:
    config, tasks = prepared.resolved.config, _list_tasks(prepared.sources.train)
    reward = make_run_rewards(config)
    known = reward.terms if isinstance(reward, RoutedReward) else ()
    terms = [term for term in known if isinstance(term.reward, WorkerReward)]
    chosen = [(term, next((task for task in tasks if term.claims(task)), tasks[0])) for term in terms if tasks]
    if not chosen:
        return []
    column = config.actor_train.data_args.answer
    async with open_reward_workers(RoutedReward(terms)):
        return [await _try_reward(term, task, str(task.data.get(column or "", ""))) for term, task in chosen]


async def _try_reward(term: RewardTerm, task: Task, text: str) -> str:
    generation = Generation(actions=(), logps=(), runs=(), finish=FinishReason.STOP, text=text)
    episode = Episode(sample_id="0.0", task=task, turns=(Turn(observation=(), generation=generation),))
    row = f"for the first row and the text {text[:40]!r}"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            score = await term.score(episode)
    except TimeoutError:
        return f"note: {term.label} has no verdict after {_TIMEOUT_S:g} s {row}"
    except RewardError as error:
        if NOT_A_NUMBER in str(error):
            raise ConfigError(f"{error}, {row}") from error
        return f"note: {error}, {row}"
    return f"{term.label} gives {score.value:g} {row}"


async def _try_environments(prepared: PreparedRun) -> list[str]:
    specs = [spec for spec in make_environment_specs(prepared.resolved) if spec.name != OPENAI_AGENT]
    if not specs:
        return []
    tasks = {task.domain: task for task in reversed(_list_tasks(prepared.sources.train))}
    pool = make_environment_pool(prepared.resolved, prepared.policy)
    lines = []
    try:
        for tag in [spec.tag for spec in specs if spec.tag in tasks]:
            episode = pool(tasks[tag])
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    if (limited := find_concurrency_limit(episode)) is not None:
                        await limited.enter()
                    observation = await episode.reset(tasks[tag])
            except EpisodeTooLong as error:
                problem, hint = f"the first episode of {tag} {error}", "a larger one, or shorter observations"
                value = prepared.resolved.derived.sequence_length
                raise ConfigError(problem, key="sequence_length", value=value, hint=hint) from error
            except (EnvironmentFailed, TimeoutError) as error:
                lines.append(f"note: the first episode of {tag} fails: {error or f'no answer in {_TIMEOUT_S:g} s'}")
            else:
                longest = prepared.resolved.derived.sequence_length
                length = len(observation.tokens)
                lines.append(f"{tag}: the first observation has {length} tokens, an episode at most {longest}")
            finally:
                await episode.close()
    finally:
        await pool.close()
    return lines
