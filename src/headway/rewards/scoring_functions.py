"""Rewards from functions `(text, task_data) -> float | dict`: built-in ones, users' own, and those of verl or TRL.

Guarantees: if a function raises, or returns something that is not a finite number, that becomes a `RewardError` that
names the function and the value. `reward_registry` decides where users' functions run.

Functions that were written for verl or TRL are recognised by the names of their parameters and called as they expect:

    verl    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> a number, or a dict with `score`
            compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> a list of these
    TRL     reward(prompts, completions, <column>, …, **kwargs) -> a list of numbers

One call is about one answer, so lists have one element; the answer to a list of messages is a message too. A
function gets only the parameters it asks for. Tokens (`completion_ids`) and the trainer's state are not available.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from math import isfinite
from numbers import Real
from typing import Any

from headway.errors import RewardError
from headway.rewards.base import final_text
from headway.types import Episode, Score

ScoringFunction = Callable[[Any, Mapping[str, Any]], Any]
"""A quick function, or a coroutine function, of what a reward looks at and the task's data."""
UserFunction = Callable[..., Any]
NOT_A_NUMBER = "not a number"
"""End of the error for a function that returned something else."""


class BuiltInReward:
    """A function of ours that is done in microseconds or is `async`. `view` picks what it sees of an episode."""

    def __init__(self, name: str, function: ScoringFunction, *, view: Callable[[Episode], Any] = final_text) -> None:
        self._name, self._function, self._view = name, function, view

    async def score(self, episode: Episode) -> Score:
        return await self.score_text(self._view(episode), episode.task.data)

    async def score_text(self, seen: Any, data: Mapping[str, Any]) -> Score:
        """Score what the function looks at, without an episode around it."""
        result = self._function(seen, data)
        return result_to_score(self._name, await result if inspect.isawaitable(result) else result)


def result_to_score(name: str, result: Any) -> Score:
    """Convert a result: a finite number, a dict with a number under `score` and more beside it, or a `Score`."""
    if isinstance(result, Score):
        result = {**result.parts, "score": result.value}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(f"{name} returned a dict without 'score': {_shorten(result)}")
        parts = {str(key): _to_number(f"{name}[{key!r}]", value) for key, value in result.items() if key != "score"}
        return Score(value=_to_number(f"{name}['score']", result["score"]), parts=parts)
    return Score(value=_to_number(name, result))


def _to_number(name: str, value: Any) -> float:
    if not isinstance(value, Real) and type(value).__module__ != "numpy":
        raise RewardError(f"{name} returned {_shorten(value)} ({type(value).__name__}), {NOT_A_NUMBER}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{name} returned {_shorten(value)} ({type(value).__name__}): {error}") from error
    if not isfinite(number):
        raise RewardError(f"{name} returned {number}, which is no reward")
    return number


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def adapt_foreign_function(function: UserFunction, answer: str) -> UserFunction | None:
    """Wrap a function of verl or TRL as `(text, task_data, **reward_args)`; return None for any other function.

    `answer` names the column of the task's answer.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())

    def select(offered: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in offered.items() if takes_all or name in parameters}

    if {"solution_str", "ground_truth"} <= parameters.keys():
        return lambda text, data, **more: function(**{**select(_verl_arguments(text, data, answer)), **more})
    if {"solution_strs", "ground_truths"} <= parameters.keys():  # of verl's reward manager `batch`

        def call(text: str, data: Mapping[str, Any], **more: Any) -> Any:
            offered = {f"{name}s": [value] for name, value in _verl_arguments(text, data, answer).items()}
            return _unwrap_single(function(**{**select(offered), **more}))

        return call
    if "completions" in parameters:
        return lambda text, data, **more: _unwrap_single(function(**{**select(_trl_arguments(text, data)), **more}))
    return None


def _verl_arguments(text: str, data: Mapping[str, Any], answer: str) -> dict[str, Any]:
    model = data.get("reward_model")
    truth = model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else data[answer]
    return {
        "data_source": data.get("data_source", ""),
        "solution_str": text,
        "ground_truth": truth,
        "extra_info": data.get("extra_info"),
    }


def _trl_arguments(text: str, data: Mapping[str, Any]) -> dict[str, Any]:
    prompt = data.get("prompt")
    completion = [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
    return {**{name: [value] for name, value in data.items()}, "prompts": [prompt], "completions": [completion]}


def _unwrap_single(result: Any) -> Any:
    """Return the only element of a list; return anything else unchanged, for `result_to_score` to reject."""
    if inspect.isawaitable(result):
        return _await_single(result)
    return result[0] if isinstance(result, list | tuple) and len(result) == 1 else result


async def _await_single(result: Awaitable[Any]) -> Any:
    return _unwrap_single(await result)
