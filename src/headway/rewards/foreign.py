"""Reward functions that were written for verl or TRL, called as they expect; known by the names of their parameters.

    verl    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> a number, or a dict with `score`
    TRL     reward(prompts, completions, <column>, …, **kwargs) -> a list of numbers

A call is about one answer, so TRL's lists have one element; answers to a list of messages are messages too, as there.
What a function does not ask for it is not given. Tokens (`completion_ids`) and the trainer's state are not to be had.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Judge = Callable[..., Any]


def adapted(function: Judge, answer: str) -> Judge | None:
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
