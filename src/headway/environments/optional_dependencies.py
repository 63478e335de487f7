"""Libraries that not everybody has: imported when they are needed, asked for by name when they are missing."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from contextlib import suppress
from types import ModuleType
from typing import Any

from headway.errors import ConfigError


def import_optional_library(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """The module, or a `ConfigError` that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"pip install 'headway[{extra}]'"
        raise ConfigError(
            f"needs {module.partition('.')[0]}: {error}", key="env_type", value=wanted_by, hint=hint
        ) from error


_JAVA_EXIT_TIMEOUT_S = 5.0


def require_java(wanted_by: str) -> None:
    """Raises `ConfigError` where there is no Java."""
    if shutil.which("java") is None:
        raise ConfigError("needs Java", key="env_type", value=wanted_by, hint="apt install default-jre-headless")


def close_java_world(world: Any) -> None:
    """Close a world of TextWorldExpress or ScienceWorld and wait until its process is gone."""
    process = world._gateway.java_process
    with suppress(Exception):  # a process that died or hangs refuses the polite way
        world.close()
    try:
        process.wait(_JAVA_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
