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
from headway.rewards.answer_extraction import final_text
from headway.rewards.answer_rewards import make_exact_reward, make_numeric_reward
from headway.rewards.base import EpisodeReturn, Reward
from headway.rewards.code_reward import make_code_reward
from headway.rewards.function_reward import FunctionReward, adapt_foreign_function
from headway.rewards.ifeval_reward import make_ifeval_reward
from headway.rewards.images.image_reward import get_episode_image, image_to_array, make_compressibility_reward
from headway.rewards.images.image_server_reward import make_image_server_reward
from headway.rewards.images.ocr_reward import make_ocr_reward
from headway.rewards.judge_rewards import make_judge_reward, make_vision_judge_reward
from headway.rewards.math_reward import make_math_reward
from headway.rewards.pattern_rewards import make_format_reward, make_regex_reward
from headway.rewards.reasoning_reward import make_reasoning_gym_reward
from headway.rewards.reward_composition import RewardTerm, RoutedReward
from headway.types import Episode
from headway.user_code import import_object

RewardFactory = Callable[..., Reward]

_FACTORIES: dict[str, RewardFactory] = {
    "code": make_code_reward,
    "compressibility": make_compressibility_reward,
    "environment": EpisodeReturn,
    "exact": make_exact_reward,
    "format": make_format_reward,
    "ifeval": make_ifeval_reward,
    "image_server": make_image_server_reward,
    "judge": make_judge_reward,
    "math": make_math_reward,
    "numeric": make_numeric_reward,
    "ocr": make_ocr_reward,
    "reasoning_gym": make_reasoning_gym_reward,
    "regex": make_regex_reward,
    "vision_judge": make_vision_judge_reward,
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
        parts[name] = RewardTerm(name=name, reward=reward, weight=config.weight, domains=frozenset(config.tag_included))
    return RoutedReward(parts)


def _users(path: str, given: dict[str, Any], answer: str) -> Reward:
    """The user's own: a function `(text or image, task_data, **reward_args)`, or a class with `score(episode)`.

    One whose first parameter is called `image` gets the picture, as an array `uint8 [height, width, 3]`. Functions of
    verl's and TRL's kind are called as they expect.
    """
    concurrency = given.pop("concurrency", 8)
    found = import_object(path, key="reward_fn", kind="function")
    if inspect.isclass(found) and hasattr(found, "score"):
        _check_arguments(found, path, (), given)
        return cast(Reward, found(**given))
    if not callable(found):
        raise ConfigError(f"is a {type(found).__name__}, not a function", key="reward_fn", value=path)
    if (theirs := adapt_foreign_function(found, answer)) is not None:
        _check_arguments(found, path, (), given, partly=True)
        return FunctionReward(path, theirs, given, concurrency=concurrency)
    _check_arguments(found, path, ("text", {}), given)
    shown = _pixels if _first_parameter(found) == "image" else final_text
    return FunctionReward(path, found, given, concurrency=concurrency, shown=shown)


def _pixels(episode: Episode) -> Any:
    return image_to_array(get_episode_image(episode))


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
