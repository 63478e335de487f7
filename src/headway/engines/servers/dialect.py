"""What differs from server to server.

The engine asks in this order. A flip: `stop` (everything that runs ends, with the tokens it has), then all streams are
read to their ends, `hold` (nothing new begins), `load`, `label`, `go_on`. A dialect holds no state but the name of the
server's model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.engines.servers.launch import Launch
from headway.engines.servers.link import Link
from headway.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as a server gets it."""

    key: str
    """The server's name for it. All are of one length: SGLang aborts whatever begins with the one it is given."""
    prompt: Sequence[int]
    count: int
    """Most tokens to make."""
    params: SamplingParams
    ends: Sequence[int]
    """Tokens that end it."""
    label: str
    """Of the weights; prefixes are shared only under the same one."""

    def drawing(self) -> dict[str, Any]:
        """How tokens are drawn and where a request ends, in words that both servers know; a checkpoint has no say."""
        return {
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "top_k": self.params.top_k if self.params.top_k > 0 else -1,
            "min_p": self.params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(self.params.stop),
            "stop_token_ids": list(self.ends),
            "skip_special_tokens": False,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one event of a stream adds."""

    tokens: Sequence[int] = ()
    logps: Sequence[float] = ()
    finish: FinishReason | None = None
    label: str | None = None
    """Of the weights, where the server says so in every event."""


class Dialect(Protocol):
    """One kind of server."""

    name: str
    package: str
    """Installed where it can be launched."""
    path: str
    """Where requests go."""
    hint: str
    """What a server must have been started with."""
    probe: SamplingParams
    """With these, tokens are drawn from a distribution in which all that can be drawn are equally likely."""

    async def greet(self, link: Link, timeout_s: float) -> None:
        """Learn what requests need, and see that everything is there that a run needs."""
        ...

    def body(self, asked: Asked) -> dict[str, Any]:
        """A request, streamed."""
        ...

    def read(self, event: Mapping[str, Any], seen: int) -> Told:
        """What an event adds to the `seen` tokens before it. Raises `ServerLost` for an event that is an error."""
        ...

    async def abort(self, link: Link, key: str, timeout_s: float) -> None:
        """End one request; its stream tells what it has and ends."""
        ...

    async def stop(self, link: Link, timeout_s: float) -> None:
        """End all requests."""
        ...

    async def hold(self, link: Link, timeout_s: float) -> None:
        """Begin nothing before `go_on`."""
        ...

    async def go_on(self, link: Link, timeout_s: float) -> None:
        """Work again."""
        ...

    async def load(self, link: Link, directory: Path, label: str, timeout_s: float) -> None:
        """Serve the weights in `directory` under `label`, with nothing cached from others. Nothing runs meanwhile."""
        ...

    async def label(self, link: Link, timeout_s: float) -> str:
        """Of the weights that are served now."""
        ...

    def command(self, launch: Launch) -> tuple[list[str], dict[str, str]]:
        """How one is started: command line and additions to the environment."""
        ...
