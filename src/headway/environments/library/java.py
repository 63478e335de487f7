"""Worlds that live in a Java process: checked before they start, and really gone when they are closed.

Each environment object has a process of its own, which the library starts and which ends when its standard input does;
so it does not outlive us, however we end.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from typing import Any

from headway.errors import ConfigError

_ENDING_S = 5.0


def check_java(wanted_by: str) -> None:
    """Raises `ConfigError` where there is no Java."""
    if shutil.which("java") is None:
        raise ConfigError("needs Java", key="env_type", value=wanted_by, hint="apt install default-jre-headless")


def end(world: Any) -> None:
    """Close a world of TextWorldExpress or ScienceWorld and wait until its process is gone."""
    process = world._gateway.java_process
    with suppress(Exception):  # a process that died or hangs refuses the polite way
        world.close()
    try:
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
