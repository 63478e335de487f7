"""How one server is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How one server is used."""

    slots: int = 16
    """Requests at a time."""
    context_tokens: int = 4096
    """Of a prompt and its answer together."""
    call_s: float = 30.0
    """For calls that a server answers at once."""
    load_s: float = 600.0
    """For loading a version."""
    first_s: float = 600.0
    """Until a server answers at the start of a run."""
    start_s: float = 600.0
    """Until a server answers that was restarted."""
    silence_s: float = 300.0
    """A request without news for this long: the server hangs."""
    drain_s: float = 5.0
    """For the last tokens of requests that were ended."""
