"""Environments by registered name, by `module:Class` or by `file.py:Class`.

Every mistake in a name or an option is a `ConfigError` here, before anything starts. Modules, and packages that not
every installation has, are imported only when an environment of theirs is asked for.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from headway.environments.text_environment import TextEnvironment
from headway.errors import ConfigError, suggest_close_match
from headway.registry import ENVIRONMENTS
from headway.user_code import find_import_path, import_object, make_import_path_absolute, preserve_working_directory

EnvironmentClass = Callable[..., TextEnvironment]
"""A class, or any function that makes an environment; its keyword parameters are the options."""

BUILT_IN_ENVIRONMENTS: dict[str, str] = {
    "alfworld": "headway.environments.library.text_games:ALFWorld",
    "frozen_lake": "headway.environments.library.frozen_lake:FrozenLake",
    "gem": "headway.environments.library.gem_environment:GemEnvironment",
    "gymnasium": "headway.environments.library.gym_environments:GymnasiumEnvironment",
    "question": "headway.environments.library.question_environment:QuestionEnvironment",
    "reasoning_gym": "headway.environments.library.gym_environments:ReasoningGymEnvironment",
    "repair": "headway.environments.library.repair:RepairEnvironment",
    "scienceworld": "headway.environments.library.text_games:ScienceWorld",
    "shop": "headway.environments.library.shop:ShopEnvironment",
    "sokoban": "headway.environments.library.sokoban:Sokoban",
    "sokoban_native_env": "headway.environments.library.sokoban:Sokoban",
    "textworld": "headway.environments.library.text_games:TextWorldExpress",
    "tools": "headway.environments.tools.tool_environment:ToolEnvironment",
    "verifiers": "headway.environments.library.verifiers_environment:VerifiersEnvironment",
    "webshop": "headway.environments.library.roll_worlds:make_webshop",
}
"""Import path of every environment that comes with Headway."""
_WORLD_KINDS = ("math", "qa", "logic", "code", "eval", "rg", "game")
"""First parts of the ids of GEM's worlds."""


def is_built_in(name: str) -> bool:
    """Return whether an environment comes with Headway: under a name of ours, or as a world that ROLL names."""
    return name in BUILT_IN_ENVIRONMENTS or (name not in ENVIRONMENTS and _find_world(name) is not None)


def _find_world(name: str) -> EnvironmentClass | None:
    kind, separator, _ = name.partition(":")
    if separator and kind not in _WORLD_KINDS:
        return None  # a class of the user's, for which nothing more is imported
    from headway.environments.library.roll_worlds import find_world  # it imports several environments

    return find_world(name)


def find_environment_path(name: str) -> str | None:
    """Return what worker processes can import for `name`; `None` if it was registered by code that has no path."""
    if is_built_in(name):
        return name
    if name in ENVIRONMENTS or name.startswith("__main__:"):
        return find_import_path(find_environment_class(name))
    return make_import_path_absolute(name)


def list_environment_names() -> tuple[str, ...]:
    """Return all names, built-in and registered, in alphabetical order."""
    return tuple(sorted(ENVIRONMENTS.names()))


def find_environment_class(name: str) -> EnvironmentClass:
    """Return the class, or function, that makes the environments of that name. Raises `ConfigError`."""
    if name in ENVIRONMENTS and name not in BUILT_IN_ENVIRONMENTS:
        return cast(EnvironmentClass, ENVIRONMENTS.get(name))
    if name not in BUILT_IN_ENVIRONMENTS and (world := _find_world(name)) is not None:
        return world
    path = BUILT_IN_ENVIRONMENTS.get(name, name)
    if ":" not in path:
        names = list_environment_names()
        hint = f"one of {', '.join(names)}, or module:Class of your own"
        raise ConfigError(f"is no environment{suggest_close_match(name, names)}", key="env_type", value=name, hint=hint)
    found = import_object(path, key="env_type", kind="Class")
    if not callable(found):
        raise ConfigError(f"is a {type(found).__name__}, not a class", key="env_type", value=path)
    return cast(EnvironmentClass, found)


def make_environment(name: str, **options: Any) -> TextEnvironment:
    """Make an environment with its options. Raises `ConfigError`, also for errors of its constructor."""
    factory = find_environment_class(name)
    check_environment_options(factory, name, options)
    try:
        with preserve_working_directory():
            environment = factory(**options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(problem, key="env_type", value=name, hint=f"with the options {options}") from error
    if not all(callable(getattr(environment, method, None)) for method in ("reset", "step")):
        raise ConfigError(f"made a {type(environment).__name__} without reset and step", key="env_type", value=name)
    return environment


def check_environment_options(factory: EnvironmentClass, name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the factory does not accept the options or lacks a required one."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # C code has no signature; it reports its own errors
    known = [one for one, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    try:
        signature.bind(**options)
    except TypeError as error:
        unknown = [option for option in options if option not in known]
        problem = f"{error}{suggest_close_match(unknown[0], known) if unknown else ''}"
        hint = f"options of {name}: {', '.join(known) or 'none'}"
        raise ConfigError(problem, key="env_config", value=dict(options), hint=hint) from error
