"""Libraries that not everybody has: imported when they are needed, asked for by name when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from headway.errors import ConfigError


def library(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """The module, or a `ConfigError` that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"pip install 'headway[{extra}]'"
        raise ConfigError(
            f"needs {module.partition('.')[0]}: {error}", key="env_type", value=wanted_by, hint=hint
        ) from error
