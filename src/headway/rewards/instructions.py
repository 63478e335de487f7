"""Following instructions on form, the way IFEval judges it: strict, or loose over a few readings of the text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.rewards.checks import CHECKS
from headway.rewards.function import QuickReward

Instruction = tuple[str, Mapping[str, Any]]


def ifeval(
    *,
    checks: Sequence[Mapping[str, Any]] = (),
    instructions: str = "instruction_id_list",
    parameters: str = "kwargs",
    loose: bool = False,
    partial: bool = False,
) -> QuickReward:
    """1 where the text follows every instruction, else 0; the share that it follows with `partial`.

    Instructions come from the task, under `instructions` and `parameters` as in IFEval's data, and from `checks`: a
    list of `{id: NAME, parameter: value, …}` for every task. `loose` also accepts the text without its first line,
    its last line, its asterisks, or any of these together.
    """
    common = [_from_config(entry) for entry in checks]

    def judge(text: str, data: Mapping[str, Any]) -> float:
        asked = [*common, *_from_data(data, instructions, parameters)]
        if not asked:
            raise RewardError(f"no instruction to check: neither `checks` nor the task's {instructions!r} has one")
        readings = loosened(text) if loose else [text]
        followed = [any(reading.strip() and _holds(one, reading) for reading in readings) for one in asked]
        return sum(followed) / len(followed) if partial else float(all(followed))

    return QuickReward("ifeval", judge)


def loosened(text: str) -> list[str]:
    """The text as it is, and without what models like to put around an answer."""
    lines = text.split("\n")
    readings = [text, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    readings = [reading.strip() for reading in readings]
    return [text, *readings, *(reading.replace("*", "") for reading in readings)]


def _holds(instruction: Instruction, text: str) -> bool:
    name, given = instruction
    try:
        return CHECKS[name](text, **given)
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardError(f"{name} cannot be checked with {dict(given)}: {error}") from error


def _from_data(data: Mapping[str, Any], instructions: str, parameters: str) -> list[Instruction]:
    names, given = data.get(instructions) or [], data.get(parameters) or []
    if len(given) not in (0, len(names)):
        raise RewardError(f"the task has {len(names)} instructions and {len(given)} sets of parameters")
    for name in names:
        if name not in CHECKS:
            raise RewardError(f"no check for the instruction {name!r}{_meant(name)}")
    # IFEval's data has a null for every parameter of every other instruction
    sets = [{key: value for key, value in (one or {}).items() if value is not None} for one in given]
    return list(zip(names, sets or [{}] * len(names), strict=True))


def _from_config(entry: Mapping[str, Any]) -> Instruction:
    given = dict(entry)
    name = given.pop("id", None)
    if name not in CHECKS:
        raise ConfigError(f"is no check{_meant(str(name))}", key="checks", value=name, hint=", ".join(sorted(CHECKS)))
    try:
        inspect.signature(CHECKS[name]).bind("", **given)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", key="checks", value=dict(entry)) from error
    return name, given


def _meant(name: str) -> str:
    close = get_close_matches(name, CHECKS, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
