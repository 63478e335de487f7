"""One sandbox for the tests, or the reason why there is none here."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headway.sandbox import ProgramOutcome, Sandbox, SandboxLimits

T = TypeVar("T")


@cache
def refusal() -> str:
    """Why this machine cannot run untrusted code; empty where it can."""
    return asyncio.run(Sandbox().probe()).reason


def require_sandbox() -> None:
    """Skip the test with the probe's reason where there is no sandbox."""
    if refusal():
        pytest.skip(refusal())


def run(code: str, *, sandbox: Sandbox | None = None, **options: Any) -> ProgramOutcome:
    """`code` in a sandbox of its own, with small limits."""
    require_sandbox()
    limits = SandboxLimits(**{"wall_s": 8, "cpu_s": 5, "memory_mb": 256, "disk_mb": 8, "output_kb": 64, **options})
    return asyncio.run((sandbox or Sandbox()).run_python(code, limits=limits))


def play(scene: Coroutine[Any, Any, T]) -> T:
    """Run a test that needs more than one call."""
    if refusal():
        scene.close()
        pytest.skip(refusal())
    return asyncio.run(scene)


def processes_with(marker: str) -> list[int]:
    """Processes of this machine that have `marker` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
