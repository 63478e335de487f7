"""Python packages that not every installation has: imported when needed, with a hint if they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from headway.errors import ConfigError


def import_optional_library(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import a module. Raises a `ConfigError` that names the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem, hint = f"needs {module.partition('.')[0]}: {error}", f"pip install 'headway[{extra}]'"
        raise ConfigError(problem, key="env_type", value=wanted_by, hint=hint) from error
