"""A reward from a function `(text, task_data) -> float | dict`, the user's own or one of ours.

Guarantees: whatever the function raises or returns that is not a finite number becomes a `RewardError` that names the
function and the value. Functions of the user that are not `async` run on threads, so that a slow one holds up nobody.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from math import isfinite
from numbers import Real
from typing import Any

from headway.errors import RewardError
from headway.rewards.answer_extraction import final_text
from headway.rewards.thread_limiter import ThreadLimiter
from headway.types import Episode, Score

TextScorer = Callable[[str, Mapping[str, Any]], Any]


class InlineReward:
    """A function that is done in microseconds: called in place."""

    __slots__ = ("_judge", "_name")

    def __init__(self, name: str, judge: TextScorer) -> None:
        self._name, self._judge = name, judge

    async def score(self, episode: Episode) -> Score:
        return result_to_score(self._name, self._judge(final_text(episode), episode.task.data))


class AsyncReward:
    """A coroutine function of ours that waits for a process or a server."""

    __slots__ = ("_judge", "_name")

    def __init__(self, name: str, judge: TextScorer) -> None:
        self._name, self._judge = name, judge

    async def score(self, episode: Episode) -> Score:
        return result_to_score(self._name, await self._judge(final_text(episode), episode.task.data))


class FunctionReward:
    """A function of the user's own, `async` or not, with `arguments` by keyword. It sees what `shown` gives."""

    __slots__ = ("_arguments", "_function", "_name", "_shown", "_threads")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        concurrency: int = 8,
        shown: Callable[[Episode], Any] = final_text,
    ) -> None:
        self._name, self._function, self._arguments = name, function, dict(arguments)
        self._shown = shown
        self._threads = ThreadLimiter(concurrency, f"reward {name}")

    async def score(self, episode: Episode) -> Score:
        answer, data = self._shown(episode), dict(episode.task.data)
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(answer, data, **self._arguments)
            else:
                result = await self._threads.run(self._function, answer, data, **self._arguments)
                if inspect.isawaitable(result):
                    result = await result
        except RewardError:
            raise
        except Exception as error:
            where = _place(error)
            problem = f"{self._name} raised {type(error).__name__}: {error}{where} ({episode.sample_id})"
            raise RewardError(problem) from error
        return result_to_score(self._name, result)


def result_to_score(name: str, result: Any) -> Score:
    """A function's result as a score: a finite number, or a dict with one under `score` and more beside it."""
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(f"{name} returned a dict without 'score': {_shown(result)}")
        parts = {str(key): _number(f"{name}[{key!r}]", value) for key, value in result.items() if key != "score"}
        return Score(value=_number(f"{name}['score']", result["score"]), parts=parts)
    return Score(value=_number(name, result))


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Real) and type(value).__module__ != "numpy":
        raise RewardError(f"{name} returned {_shown(value)} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{name} returned {_shown(value)} ({type(value).__name__}): {error}") from error
    if not isfinite(number):
        raise RewardError(f"{name} returned {number}, which is no reward")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _place(error: BaseException) -> str:
    """File and line that raised it: the last frame of the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""


UserFunction = Callable[..., Any]


def adapt_foreign_function(function: UserFunction, answer: str) -> UserFunction | None:
    """`function` as one of `(text, task_data, **reward_args)`, where it is one of theirs. `answer` names a column."""
    try:
        takes = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    everything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())

    def asked(offered: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in offered.items() if everything or name in takes}

    if {"solution_str", "ground_truth"} <= takes.keys():
        return lambda text, data, **more: function(**{**asked(_for_verl(text, data, answer)), **more})
    if "completions" in takes:
        return lambda text, data, **more: _only(function(**{**asked(_for_trl(text, data)), **more}))
    return None


def _for_verl(text: str, data: Mapping[str, Any], answer: str) -> dict[str, Any]:
    model = data.get("reward_model")
    truth = model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else data[answer]
    return {
        "data_source": data.get("data_source", ""),
        "solution_str": text,
        "ground_truth": truth,
        "extra_info": data.get("extra_info"),
    }


def _for_trl(text: str, data: Mapping[str, Any]) -> dict[str, Any]:
    prompt = data.get("prompt")
    said = [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
    return {**{name: [value] for name, value in data.items()}, "prompts": [prompt], "completions": [said]}


def _only(result: Any) -> Any:
    """The one verdict of a list; what is no list is for others to complain about."""
    if inspect.isawaitable(result):
        return _awaited(result)
    return result[0] if isinstance(result, list | tuple) and len(result) == 1 else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return _only(await result)
