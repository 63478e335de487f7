"""Environments by name, from `module:Class` or from `file.py:Class`.

Everything that can be wrong about a name or an option is a `ConfigError` here, before anything starts. Nothing is
imported before it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, cast

from headway.environments.library import LIBRARY_ENVIRONMENTS
from headway.environments.text_environment import TextEnvironment
from headway.errors import ConfigError
from headway.user_code import import_object

EnvironmentClass = Callable[..., TextEnvironment]
"""A class, or any function that makes an environment; its keyword parameters are the options."""

_CORE = {
    "frozen_lake": "headway.environments.library.frozen_lake:FrozenLake",
    "gymnasium": "headway.environments.library.gym_environments:GymnasiumEnvironment",
    "reasoning_gym": "headway.environments.library.gym_environments:ReasoningGymEnvironment",
}
_REGISTERED: dict[str, EnvironmentClass] = {}


def register_environment(name: str) -> Callable[[EnvironmentClass], EnvironmentClass]:
    """Make a class known by name in this process; worker processes find classes by `module:Class` only."""

    def register(factory: EnvironmentClass) -> EnvironmentClass:
        if name in _REGISTERED or name in _built_in_environments():
            raise ConfigError("is taken by another environment", key="env_type", value=name)
        _REGISTERED[name] = factory
        return factory

    return register


def is_registered_in_process(name: str) -> bool:
    """Whether the name is known in this process alone."""
    return name in _REGISTERED


def list_environment_names() -> tuple[str, ...]:
    """Every name there is."""
    return tuple(sorted({*_built_in_environments(), *_REGISTERED}))


def find_environment_class(name: str) -> EnvironmentClass:
    """What makes the environments of that name. Raises `ConfigError`."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    path = _built_in_environments().get(name, name)
    if ":" not in path:
        close = get_close_matches(name, list_environment_names(), n=1)
        meant = f", did you mean {close[0]!r}?" if close else ""
        hint = f"one of {', '.join(list_environment_names())}, or module:Class of your own"
        raise ConfigError(f"is no environment{meant}", key="env_type", value=name, hint=hint)
    return _import_environment_class(path)


def make_environment(name: str, **options: Any) -> TextEnvironment:
    """An environment with its options. Raises `ConfigError`, also for what its constructor raises."""
    factory = find_environment_class(name)
    check_environment_options(factory, name, options)
    try:
        made = factory(**options)
    except ConfigError:
        raise
    except Exception as error:
        problem = f"cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(problem, key="env_type", value=name, hint=f"with the options {options}") from error
    if not all(callable(getattr(made, method, None)) for method in ("reset", "step")):
        raise ConfigError(f"made a {type(made).__name__} without reset and step", key="env_type", value=name)
    return made


def check_environment_options(factory: EnvironmentClass, name: str, options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where the factory does not take the options, or misses one."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # written in C: it will say itself what is wrong
    known = [one for one, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    try:
        signature.bind(**options)
    except TypeError as error:
        unknown = [option for option in options if option not in known]
        close = get_close_matches(unknown[0], known, n=1) if unknown else []
        meant = f", did you mean {close[0]!r}?" if close else ""
        hint = f"options of {name}: {', '.join(known) or 'none'}"
        raise ConfigError(f"{error}{meant}", key="env_config", value=dict(options), hint=hint) from error


def _built_in_environments() -> dict[str, str]:
    return {**_CORE, **LIBRARY_ENVIRONMENTS}


def _import_environment_class(path: str) -> EnvironmentClass:
    found = import_object(path, key="env_type", kind="Class")
    if not callable(found):
        raise ConfigError(f"is a {type(found).__name__}, not a class", key="env_type", value=path)
    return cast(EnvironmentClass, found)
