"""Isolation of untrusted programs. See `Sandbox`."""

from headway.sandbox.probe import SandboxProbe
from headway.sandbox.sandbox import Sandbox
from headway.sandbox.sandbox_limits import ProgramEnding, ProgramOutcome, SandboxBroken, SandboxLimits, SandboxRefused

__all__ = [
    "ProgramEnding",
    "ProgramOutcome",
    "Sandbox",
    "SandboxBroken",
    "SandboxLimits",
    "SandboxProbe",
    "SandboxRefused",
]
