"""Extras: the groups of optional packages in pyproject.toml, how they are imported and how a missing one is installed.

Commands name the packages themselves, so they are right for a clone, a wheel and a package index alike.
"""

import importlib
import re
from typing import Any

from headway.errors import ConfigError

_NAME = "headway"


def import_optional(module: str, *, extra: str, key: str, value: object, problem: str = "") -> Any:
    """Import a module of an extra. Raises a `ConfigError` that says how to install it if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = problem or f"needs {module.partition('.')[0]}: {error}"
        raise ConfigError(problem, key=key, value=value, hint=suggest_install(extra)) from error


def suggest_install(extra: str) -> str:
    """Return the command that installs what is missing of an extra into the environment that is in use."""
    listed = _list_requirements(extra)
    wanted = [one for one in listed if not _is_installed(one)] or listed or [f"{_NAME}[{extra}]"]
    return f"pip install {' '.join(repr(requirement) for requirement in wanted)}"


def _list_requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, such as `peft>=0.17`; none where Headway was not installed by pip."""
    from importlib.metadata import PackageNotFoundError, requires  # takes long to import, and is rarely needed

    try:
        listed = requires(_NAME) or []
    except PackageNotFoundError:
        return []
    marked = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    return [requirement.partition(";")[0].strip() for requirement in listed if marked.search(requirement)]


def _is_installed(requirement: str) -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
    except PackageNotFoundError:
        return False
    return True
