"""What differs from server to server.

The engine asks in this order. A flip: `stop` (everything that runs ends, with the tokens it has), then all streams are
read to their ends, `hold` (nothing new begins), `load`, `label`, `go_on`. A dialect holds no state but the name of the
server's model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.engines.servers.http_client import HttpClient, ServerLostError, ServerRefusedError
from headway.engines.servers.server_process import ServerHandle
from headway.engines.servers.settings import LaunchSettings
from headway.errors import ConfigError, EngineCrashed
from headway.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
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
class ServerChunk:
    """What one event of a stream adds."""

    tokens: Sequence[int] = ()
    logps: Sequence[float] = ()
    finish: FinishReason | None = None
    label: str | None = None
    """Of the weights, where the server says so in every event."""


class ServerDialect(Protocol):
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

    async def greet(self, link: HttpClient, timeout_s: float) -> None:
        """Learn what requests need, and see that everything is there that a run needs."""
        ...

    def body(self, asked: ServerRequest) -> dict[str, Any]:
        """A request, streamed."""
        ...

    def read(self, event: Mapping[str, Any], seen: int) -> ServerChunk:
        """What an event adds to the `seen` tokens before it. Raises `ServerLost` for an event that is an error."""
        ...

    async def abort(self, link: HttpClient, key: str, timeout_s: float) -> None:
        """End one request; its stream tells what it has and ends."""
        ...

    async def stop(self, link: HttpClient, timeout_s: float) -> None:
        """End all requests."""
        ...

    async def hold(self, link: HttpClient, timeout_s: float) -> None:
        """Begin nothing before `go_on`."""
        ...

    async def go_on(self, link: HttpClient, timeout_s: float) -> None:
        """Work again."""
        ...

    async def load(self, link: HttpClient, directory: Path, label: str, timeout_s: float) -> None:
        """Serve the weights in `directory` under `label`, with nothing cached from others. Nothing runs meanwhile."""
        ...

    async def label(self, link: HttpClient, timeout_s: float) -> str:
        """Of the weights that are served now."""
        ...

    def command(self, launch: LaunchSettings) -> tuple[list[str], dict[str, str]]:
        """How one is started: command line and additions to the environment."""
        ...


_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0
_PROBE = "headway-probe"
_SPREAD = 0.1
"""Nats between the likeliest and the least likely of the tokens drawn."""


async def wait_until_ready(name: str, link: HttpClient, server: ServerHandle, start_s: float) -> None:
    """Until it says that it is well. Raises `EngineCrashed` after `start_s`, or when it has ended."""
    loop = asyncio.get_running_loop()
    deadline, pause_s, said = loop.time() + start_s, _FIRST_LOOK_S, ""
    while True:
        try:
            await link.get("/health", timeout_s=max(min(5.0, deadline - loop.time()), 0.01))
            return
        except (ServerLostError, ServerRefusedError) as error:
            said = str(error)
        if server.ended:
            raise EngineCrashed(server.ended)
        if loop.time() + pause_s > deadline:
            raise EngineCrashed(f"{name} does not answer after {start_s:g} s: {said}")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_LOOK_S)


async def check_logprobs(name: str, link: HttpClient, dialect: ServerDialect, silence_s: float) -> None:
    """Raises `ConfigError` where they are the model's own, `EngineCrashed` where nothing comes."""
    params = dialect.probe
    asked = ServerRequest(
        key="headway-probe", prompt=[0, 1], count=params.max_new_tokens, params=params, ends=(), label="probe"
    )
    logps: list[float] = []
    try:
        async with aclosing(link.events(dialect.path, dialect.body(asked), silence_s=silence_s)) as events:
            async for event in events:
                told = dialect.read(event, len(logps))
                logps += told.logps
                if told.finish is not None:
                    break
    except (ServerLostError, ServerRefusedError) as error:
        raise EngineCrashed(f"{name}: {error} (a server needs {dialect.hint})") from error
    if not logps:
        raise EngineCrashed(f"{name}: {link.url} answers without log-probabilities")
    spread = max(logps) - min(logps)
    if spread > _SPREAD:
        raise ConfigError(
            f"its log-probabilities are those before the temperature (they differ by {spread:.1f} where they must not)",
            key="actor_infer.strategy_args.strategy_config.url",
            value=link.url,
            hint=f"start the server with {dialect.hint}",
        )
