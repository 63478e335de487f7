"""Sandbox: a place for code that nobody has read. See `Sandbox`."""

from headway.sandbox.limits import Ending, Limits, Outcome, SandboxBroken, SandboxRefused
from headway.sandbox.probe import Probe
from headway.sandbox.sandbox import Sandbox

__all__ = ["Ending", "Limits", "Outcome", "Probe", "Sandbox", "SandboxBroken", "SandboxRefused"]
