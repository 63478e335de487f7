"""Dependencies that not every installation has: optional Python packages, and Java.

A missing dependency is a `ConfigError` that says how to install it. An environment that needs Java has one Java process
per object. The Python library starts that process, and it exits when its standard input closes, so it does not outlive
this process.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from contextlib import suppress
from types import ModuleType
from typing import Any

from headway.errors import ConfigError

_JAVA_EXIT_TIMEOUT_S = 5.0


def import_optional_library(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import a module. Raises a `ConfigError` that names the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem, hint = f"needs {module.partition('.')[0]}: {error}", f"pip install 'headway[{extra}]'"
        raise ConfigError(problem, key="env_type", value=wanted_by, hint=hint) from error


def require_java(wanted_by: str) -> None:
    """Raise `ConfigError` if Java is not installed."""
    if shutil.which("java") is None:
        raise ConfigError("needs Java", key="env_type", value=wanted_by, hint="apt install default-jre-headless")


def close_java_world(world: Any) -> None:
    """Close an environment of TextWorldExpress or ScienceWorld and wait until its Java process has exited."""
    process = world._gateway.java_process
    with suppress(Exception):  # the gateway raises if the process has died or hangs
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
