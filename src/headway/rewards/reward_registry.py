"""Rewards by name, by `module:function` or by `file.py:function`, and the weighted sum of several for a task.

Guarantees: everything that can be wrong about a name, a function's signature or its arguments is a `ConfigError` here,
before anything starts. All terms of one sample are scored at the same time, so the slowest decides how long it takes,
and no other sample waits. If one term has no score, the sample has none, and its other terms are cancelled.
"""

import asyncio
import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import Config, RewardConfig
from headway.config.reward_model_choice import get_reward_function, is_served_here
from headway.config.roles import EVERY_TASK
from headway.errors import ConfigError, RewardError
from headway.processes.child_process import choose_memory_limit_mb
from headway.registry import REWARDS
from headway.rewards.base import EpisodeReturn, Reward
from headway.rewards.code_reward import make_code_reward
from headway.rewards.ifeval_reward import make_ifeval_reward
from headway.rewards.images.image_reward import make_compressibility_reward
from headway.rewards.images.image_server_reward import make_image_server_reward
from headway.rewards.images.ocr_reward import make_ocr_reward
from headway.rewards.judge_rewards import JudgeReward, ServedJudgeReward, VisionJudgeReward, make_llm_judge
from headway.rewards.model_reward import ModelReward
from headway.rewards.reward_model_client import RewardModelClient
from headway.rewards.roll_rewards import (
    make_code_sandbox_reward,
    make_crossthinkqa_reward,
    make_general_val_reward,
    make_math_rule_reward,
    make_multiple_choice_reward,
)
from headway.rewards.scoring_functions import adapt_foreign_function
from headway.rewards.solver_rewards import make_math_reward, make_reasoning_gym_reward
from headway.rewards.text_rewards import (
    OverlongPenalty,
    make_exact_reward,
    make_format_reward,
    make_numeric_reward,
    make_regex_reward,
)
from headway.rewards.user_function import FunctionReward, load_function, read_function_traits
from headway.rewards.user_reward_workers import UserRewardSpec, WorkerReward
from headway.rewards.verl_rewards import make_data_source_reward
from headway.types import Episode, Score, Task
from headway.user_code import find_import_path, import_object, make_import_path_absolute

BUILT_IN_REWARDS: dict[str, Callable[..., Reward]] = {
    "code": make_code_reward,
    "code_sandbox": make_code_sandbox_reward,
    "compressibility": make_compressibility_reward,
    "crossthinkqa": make_crossthinkqa_reward,
    "data_source": make_data_source_reward,
    "environment": EpisodeReturn,
    "exact": make_exact_reward,
    "format": make_format_reward,
    "general_val": make_general_val_reward,
    "ifeval": make_ifeval_reward,
    "image_server": make_image_server_reward,
    "judge": JudgeReward,
    "llm_judge": make_llm_judge,
    "math": make_math_reward,
    "math_rule": make_math_rule_reward,
    "multiple_choice": make_multiple_choice_reward,
    "numeric": make_numeric_reward,
    "ocr": make_ocr_reward,
    "overlong": OverlongPenalty,
    "reasoning_gym": make_reasoning_gym_reward,
    "regex": make_regex_reward,
    "reward_model": ModelReward,
    "vision_judge": VisionJudgeReward,
}
"""Factories of the names that `REWARDS` lists as built in; their keyword parameters are the `reward_args`."""
_RUNS_HERE = (
    "no other process can import it, so it runs in the process of the run, which a crash of it would end; "
    'put it into a module, or the script\'s work under `if __name__ == "__main__":`'
)
FALLBACK_REWARD = "default"
"""The reward of this name also scores tasks that no other reward claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRewardLimits:
    """What a run allows the rewards of users."""

    timeout_s: float = 600.0
    """Seconds for one verdict."""
    memory_mb: int | None = None
    """Memory of a worker process. `None`: half of the machine's."""
    logs: Path | None = None
    """Directory for what workers print. `None`: it is not kept."""


def make_reward(
    reward_fn: str,
    reward_args: Mapping[str, Any] | None = None,
    *,
    answer: str | None = None,
    question: str | None = None,
    limits: UserRewardLimits | None = None,
    served_here: bool = False,
) -> Reward:
    """Return one reward. `answer` and `question` are columns of the data, the defaults of rewards that read them.

    `served_here`: the run itself serves the model of a judge.
    """
    arguments = dict(reward_args or {})
    if reward_fn not in BUILT_IN_REWARDS:
        return _make_user_reward(reward_fn, arguments, answer or "answer", limits or UserRewardLimits())
    factory = ServedJudgeReward if served_here and reward_fn == "judge" else BUILT_IN_REWARDS[reward_fn]
    parameters = inspect.signature(factory).parameters.values()
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    for name, column in (("answer", answer), ("question", question)):
        if column is not None and (takes_any or name in {one.name for one in parameters}):
            arguments.setdefault(name, column)
    _check_arguments(factory, reward_fn, (), arguments)
    return factory(**arguments)


def make_run_rewards(config: Config, logs: Path | None = None) -> Reward:
    """Return the rewards of a run, with the limits that its configuration sets. Workers write to `logs`."""
    timeout_s, memory_mb = config.reliability.reward_timeout_s, config.reliability.worker_memory_mb
    limits = UserRewardLimits(timeout_s=timeout_s, memory_mb=memory_mb, logs=logs)
    data = config.actor_train.data_args
    return make_rewards(config.rewards, answer=data.answer, question=data.prompt, limits=limits)


@asynccontextmanager
async def open_reward_workers(reward: Reward) -> AsyncIterator[None]:
    """Start the processes of users' rewards and of reward models, and end them with the block. Raises `ConfigError`."""
    workers = reward.workers if isinstance(reward, RoutedReward) else {}
    models = reward.models if isinstance(reward, RoutedReward) else {}
    clients = {name: model.client for name, model in models.items() if model.client is not None}
    try:
        starts = [_start_process(name, worker) for name, worker in workers.items()]
        starts += [_start_process(name, client) for name, client in clients.items()]
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        yield
    finally:
        for worker in workers.values():
            worker.close()
        for client in clients.values():
            await client.close()


async def _start_process(name: str, process: WorkerReward | RewardModelClient) -> None:
    try:
        await process.start()
    except ConfigError as error:
        raise ConfigError(f"rewards.{name}: {error}") from error


def make_rewards(
    rewards: Mapping[str, RewardConfig],
    *,
    answer: str | None = None,
    question: str | None = None,
    limits: UserRewardLimits | None = None,
) -> Reward:
    """Return the reward of a whole run. Without any configured reward, the environment's own rewards count."""
    if not rewards:
        return EpisodeReturn()
    terms = []
    for name, config in rewards.items():
        try:
            reward = make_reward(
                get_reward_function(name, config),
                config.reward_args,
                answer=answer,
                question=question,
                limits=limits,
                served_here=is_served_here(name, config),
            )
        except ConfigError as error:
            raise ConfigError(f"rewards.{name}{'.' if error.key else ': '}{error}") from error
        domains = frozenset(config.tag_included)
        function = get_reward_function(name, config)
        terms.append(RewardTerm(name=name, reward=reward, weight=config.weight, function=function, domains=domains))
    return RoutedReward(terms)


def find_reward_function(name: str) -> Any:
    """Return the function or class behind a name of the user's own, `None` for a built-in reward."""
    if name in BUILT_IN_REWARDS:
        return None
    return import_object(name, key="reward_fn", kind="function") if ":" in name else _get_registered(name)


def _make_user_reward(name: str, arguments: dict[str, Any], answer: str, limits: UserRewardLimits) -> Reward:
    """Return the reward of a function `(text or image, task_data, **reward_args)`, or of a class with `score(episode)`.

    `name` is a path to it, or a name that a plugin registered. A function whose first parameter is called `image` gets
    the picture, as an array `uint8 [height, width, 3]`. Functions of verl and TRL are called as they expect. It runs in
    a worker process if one can import it.
    """
    found = find_reward_function(name)
    concurrency = arguments.pop("concurrency", 8)
    if inspect.isclass(found) and hasattr(found, "score"):
        _check_arguments(found, name, (), arguments)
    elif not callable(found):
        raise ConfigError(f"is a {type(found).__name__}, not a function", key="reward_fn", value=name)
    elif adapt_foreign_function(found, answer) is not None:
        _check_arguments(found, name, (), arguments, partial=True)
    else:
        _check_arguments(found, name, ("text", {}), arguments)
    module = name.rpartition(":")[0]
    has_file = module.endswith(".py") or hasattr(sys.modules.get(module), "__file__")
    is_of_script = getattr(found, "__module__", "") == "__main__"
    path = make_import_path_absolute(name) if has_file and not is_of_script else find_import_path(found)
    if path is None:
        loaded = load_function(found, name, arguments, answer)
        return FunctionReward(loaded, concurrency=concurrency, timeout_s=limits.timeout_s)
    spec = UserRewardSpec(
        name=name,
        path=path,
        traits=read_function_traits(found),
        arguments=arguments,
        answer=answer,
        concurrency=concurrency,
        timeout_s=limits.timeout_s,
        memory_mb=choose_memory_limit_mb() if limits.memory_mb is None else limits.memory_mb,
        log=None if limits.logs is None else limits.logs / f"reward-{re.sub('[^A-Za-z0-9]+', '-', name)}.log",
    )
    return WorkerReward(spec)


def _get_registered(name: str) -> Any:
    if name not in REWARDS:
        hint = f"{REWARDS.hint(name)}; or module:function or file.py:function of your own"
        raise ConfigError("is no reward", key="reward_fn", value=name, hint=hint)
    return REWARDS.get(name, key="reward_fn")


def _check_arguments(
    function: Callable[..., Any], name: str, leading: tuple[Any, ...], given: dict[str, Any], *, partial: bool = False
) -> None:
    """Raise `ConfigError` if the function does not take the arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function written in C checks its arguments itself
    try:
        (signature.bind_partial if partial else signature.bind)(*leading, **given)
    except TypeError as error:
        if leading:
            try:
                signature.bind_partial(*leading)
            except TypeError:
                problem = f"has the parameters {signature}, and is called with a text and the row of its task"
                hint = "def reward(text, row); functions for TRL and verl are known by completions, solution_str"
                raise ConfigError(problem, key="reward_fn", value=name, hint=hint) from error
        takes = ", ".join(list(signature.parameters)[len(leading) :]) or "none"
        hint = f"arguments of {name}: {takes}"
        raise ConfigError(f"{name}: {error}", key="reward_args", value=given, hint=hint) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """One of the rewards that a score is the sum of."""

    name: str
    reward: Reward
    weight: float = 1.0
    function: str = ""
    """Name or path of the function, if it is not `name`."""
    domains: frozenset[str] = frozenset()
    """Domains or tags of the tasks that it scores. Empty: the domain with its own name."""

    @property
    def label(self) -> str:
        """Name of the term and its function in messages."""
        return f"rewards.{self.name}" + (f" ({self.function})" if self.function not in ("", self.name) else "")

    def claims(self, task: Task) -> bool:
        """Return whether it scores the task, by the task's domain or by a `tag` in its data."""
        labels = {task.domain, task.data.get("tag")}
        return not labels.isdisjoint(self.domains or {self.name})

    async def score(self, episode: Episode) -> Score:
        """Return the score without its weight. Any failure is a `RewardError` that names the term."""
        try:
            return await self.reward.score(episode)
        except RewardError as error:
            raise RewardError(f"rewards.{self.name}: {error}") from error
        except Exception as error:
            raise RewardError(f"rewards.{self.name}: {type(error).__name__}: {error}") from error


class RoutedReward:
    """Gives Σ weight · reward over the terms that claim the task; `Score.parts` has each summand under its name."""

    def __init__(self, terms: Iterable[RewardTerm]) -> None:
        self.terms = tuple(terms)
        self.workers = {term.name: term.reward for term in self.terms if isinstance(term.reward, WorkerReward)}
        """Rewards of users that have processes of their own."""
        self.models = {
            term.name: term.reward for term in self.terms if isinstance(term.reward, ModelReward | ServedJudgeReward)
        }
        """Rewards whose models this run serves; each needs a `client` before it can score."""
        local = [term.name for term in self.terms if isinstance(term.reward, FunctionReward)]
        self.notes = tuple(f"rewards.{name}: {_RUNS_HERE}" for name in local)
        """Sentences that a user should read before the run starts."""
        self._unfinished: dict[str, list[str]] = {}

    def unfinished_terms(self, sample_id: str) -> list[str]:
        return self._unfinished.get(sample_id, [])

    async def score(self, episode: Episode) -> Score:
        terms = [term for term in self.terms if term.claims(episode.task)]
        terms = terms or [term for term in self.terms if term.name == FALLBACK_REWARD]
        everywhere = [term for term in self.terms if EVERY_TASK in term.domains and term not in terms]
        if not terms and len(everywhere) < len(self.terms):
            known = ", ".join(sorted(term.name for term in self.terms))
            raise RewardError(f"no reward for the domain {episode.task.domain!r}, only for: {known}")
        terms += everywhere
        unfinished = self._unfinished[episode.sample_id] = [term.label for term in terms]
        try:
            scores = await _score_together(terms, episode, unfinished)
        finally:
            self._unfinished.pop(episode.sample_id, None)
        parts: dict[str, float] = {}
        for term, score in zip(terms, scores, strict=True):
            parts[term.name] = term.weight * score.value
            parts |= {f"{term.name}/{name}": value for name, value in score.parts.items()}
        return Score(value=sum(parts[term.name] for term in terms), parts=parts)


async def _score_together(terms: list[RewardTerm], episode: Episode, unfinished: list[str]) -> list[Score]:
    """Score all terms at once. A term that is done leaves `unfinished`."""
    if len(terms) == 1:
        return [await terms[0].score(episode)]

    async def score(term: RewardTerm) -> Score:
        found = await term.score(episode)
        unfinished.remove(term.label)
        return found

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(term), name=f"{episode.sample_id}/{term.name}") for term in terms]
    except* RewardError as failed:
        problem = failed.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise problem
