"""Rewards by name, from `module:function` or from `file.py:function`, and whole configurations of them.

Everything that can be wrong about a name, a function's signature or its arguments is a `ConfigError` here, before
anything starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, cast

from headway.config import RewardConfig
from headway.errors import ConfigError
from headway.own_code import own
from headway.rewards.base import EpisodeReturn, Reward
from headway.rewards.compose import Part, RoutedReward
from headway.rewards.exact import exact
from headway.rewards.foreign import adapted
from headway.rewards.function import FunctionReward
from headway.rewards.images.compressibility import compressibility
from headway.rewards.images.ocr import ocr
from headway.rewards.images.picture import image_of, pixels_of
from headway.rewards.images.remote import image_server
from headway.rewards.images.vision import vision_judge
from headway.rewards.instructions import ifeval
from headway.rewards.judge import judge
from headway.rewards.mathematics import math
from headway.rewards.numeric import numeric
from headway.rewards.pattern import regex, tags
from headway.rewards.program import code
from headway.rewards.reasoning import reasoning_gym
from headway.rewards.text import final_text
from headway.types import Episode

RewardFactory = Callable[..., Reward]

_FACTORIES: dict[str, RewardFactory] = {
    "code": code,
    "compressibility": compressibility,
    "environment": EpisodeReturn,
    "exact": exact,
    "format": tags,
    "ifeval": ifeval,
    "image_server": image_server,
    "judge": judge,
    "math": math,
    "numeric": numeric,
    "ocr": ocr,
    "reasoning_gym": reasoning_gym,
    "regex": regex,
    "vision_judge": vision_judge,
}


def register_reward(name: str) -> Callable[[RewardFactory], RewardFactory]:
    """Make a factory of rewards known by name; its keyword parameters are the `reward_args`."""

    def register(factory: RewardFactory) -> RewardFactory:
        if name in _FACTORIES:
            raise ConfigError("is taken by another reward", key="reward_fn", value=name)
        _FACTORIES[name] = factory
        return factory

    return register


def reward_names() -> tuple[str, ...]:
    """Every registered name."""
    return tuple(sorted(_FACTORIES))


def make_reward(reward_fn: str, reward_args: Mapping[str, Any] | None = None, *, answer: str | None = None) -> Reward:
    """One reward. `answer`: the data's answer column, for rewards that compare and are not told another."""
    given = dict(reward_args or {})
    if ":" in reward_fn:
        return _users(reward_fn, given, answer or "answer")
    factory = _FACTORIES.get(reward_fn)
    if factory is None:
        close = get_close_matches(reward_fn, _FACTORIES, n=1)
        meant = f", did you mean {close[0]!r}?" if close else ""
        hint = f"one of {', '.join(reward_names())}, or module:function or file.py:function of your own"
        raise ConfigError(f"is no reward{meant}", key="reward_fn", value=reward_fn, hint=hint)
    known = inspect.signature(factory).parameters
    if answer is not None and "answer" in known:
        given.setdefault("answer", answer)
    _check_arguments(factory, reward_fn, (), given)
    return factory(**given)


def make_rewards(rewards: Mapping[str, RewardConfig], *, answer: str | None = None) -> Reward:
    """The judge of a whole run, from the configuration's `rewards`. None configured: what the environment gave."""
    if not rewards:
        return EpisodeReturn()
    parts = {}
    for name, config in rewards.items():
        try:
            reward = make_reward(config.reward_fn or name, config.reward_args, answer=answer)
        except ConfigError as error:
            raise ConfigError(f"rewards.{name}{'.' if error.key else ': '}{error}") from error
        parts[name] = Part(name=name, reward=reward, weight=config.weight, domains=frozenset(config.tag_included))
    return RoutedReward(parts)


def _users(path: str, given: dict[str, Any], answer: str) -> Reward:
    """The user's own: a function `(text or image, task_data, **reward_args)`, or a class with `score(episode)`.

    One whose first parameter is called `image` gets the picture, as an array `uint8 [height, width, 3]`. Functions of
    verl's and TRL's kind are called as they expect.
    """
    concurrency = given.pop("concurrency", 8)
    found = own(path, key="reward_fn", kind="function")
    if inspect.isclass(found) and hasattr(found, "score"):
        _check_arguments(found, path, (), given)
        return cast(Reward, found(**given))
    if not callable(found):
        raise ConfigError(f"is a {type(found).__name__}, not a function", key="reward_fn", value=path)
    if (theirs := adapted(found, answer)) is not None:
        _check_arguments(found, path, (), given, partly=True)
        return FunctionReward(path, theirs, given, concurrency=concurrency)
    _check_arguments(found, path, ("text", {}), given)
    shown = _pixels if _first_parameter(found) == "image" else final_text
    return FunctionReward(path, found, given, concurrency=concurrency, shown=shown)


def _pixels(episode: Episode) -> Any:
    return pixels_of(image_of(episode))


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def _check_arguments(
    function: Callable[..., Any], name: str, leading: tuple[Any, ...], given: dict[str, Any], *, partly: bool = False
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C: it will say itself what is wrong
    try:
        (signature.bind_partial if partly else signature.bind)(*leading, **given)
    except TypeError as error:
        takes = ", ".join(list(signature.parameters)[len(leading) :]) or "none"
        hint = f"arguments of {name}: {takes}"
        raise ConfigError(f"{name}: {error}", key="reward_args", value=given, hint=hint) from error
