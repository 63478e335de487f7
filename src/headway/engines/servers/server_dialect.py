"""What differs from server to server, and the checks before a server is used.

An update calls in this order: `end_requests` (everything that runs ends, with the tokens it has), then all streams are
read to their ends, `hold` (nothing new begins), `load` or `load_shared`, `read_label`, `release`. A dialect holds no
state but the name of the server's model, and what its version cannot do.

Log-probabilities must be those of the distribution that tokens are drawn from. To check that, a dialect names sampling
parameters (`probe`) under which all tokens that can be drawn are equally likely: then the right log-probabilities are
all the same, and the model's own differ. Logits of 16 bits have ties: a top-k of one keeps all of the likeliest tokens,
and each of n has the probability 1/n. The check cannot tell for a model that is certain of every token.
"""

import asyncio
import math
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

from headway.engines.servers.http_client import HttpClient
from headway.engines.servers.server_process import LaunchSettings, ServerHandle
from headway.engines.streaming_engine import StreamChunk, StreamError, StreamRequest
from headway.errors import ConfigError, EngineCrashed
from headway.types import SamplingParams
from headway.weights.base import Manifest
from headway.weights.shared_version import VersionBuffer

_FIRST_POLL_S, _LAST_POLL_S = 0.02, 1.0
_MOST_SPREAD = 0.1
"""Nats between the likeliest and the least likely of the tokens drawn by `probe`."""
_MOST_TIES = 16
"""Tokens that may share the largest logit."""


class ServerDialect(Protocol):
    """One kind of server."""

    name: str
    path: str
    """Where requests are posted."""
    hint: str
    """What a server must have been started with."""
    probe: SamplingParams
    """Parameters under which all tokens that can be drawn are equally likely."""

    async def connect(self, client: HttpClient, timeout_s: float) -> None:
        """Learn what requests need, and see that everything is there that a run needs."""

    def make_body(self, request: StreamRequest) -> dict[str, Any]:
        """Return the body of a request whose answer is streamed."""

    def parse_event(self, event: Mapping[str, Any], seen: int) -> StreamChunk:
        """Return what an event adds to the `seen` tokens before it. Raises `BackendLost` for one that is an error."""

    async def abort(self, client: HttpClient, key: str, timeout_s: float) -> None:
        """End one request; its stream brings what it has and ends."""

    async def end_requests(self, client: HttpClient, timeout_s: float) -> None:
        """End all requests."""

    async def hold(self, client: HttpClient, timeout_s: float) -> None:
        """Begin nothing before `release`."""

    async def release(self, client: HttpClient, timeout_s: float) -> None:
        """Work again."""

    async def load(self, client: HttpClient, directory: Path, label: str, timeout_s: float) -> None:
        """Serve the weights in `directory` under `label`, with nothing cached from others. Nothing runs meanwhile."""

    async def load_shared(
        self, client: HttpClient, manifest: Manifest, buffer: VersionBuffer, label: str, timeout_s: float
    ) -> None:
        """Serve the weights in memory of its GPU, which it opens by a handle, as `load` does. Each phase is named."""

    async def sleep(self, client: HttpClient, timeout_s: float) -> None:
        """Free the memory of weights and KV cache. Nothing runs."""

    async def wake(self, client: HttpClient, timeout_s: float) -> None:
        """Take the memory again; weights are loaded afterwards."""

    async def read_label(self, client: HttpClient, timeout_s: float) -> str:
        """Return the label of the weights that are served now."""

    def make_command(self, launch: LaunchSettings) -> tuple[list[str], dict[str, str]]:
        """Return the command line that starts a server, and additions to its environment."""


async def wait_until_ready(name: str, client: HttpClient, server: ServerHandle, timeout_s: float) -> None:
    """Wait until the server says that it is healthy.

    Raises `EngineCrashed` after `timeout_s`, or when the server has ended or the client was closed.
    """
    loop = asyncio.get_running_loop()
    deadline, poll_s, problem = loop.time() + timeout_s, _FIRST_POLL_S, ""
    while True:
        try:
            await client.get("/health", timeout_s=max(min(5.0, deadline - loop.time()), 0.01))
            return
        except StreamError as error:
            problem = str(error)
        if server.ended or client.closed:
            raise EngineCrashed(server.ended or f"{name} is closed")
        if loop.time() + poll_s > deadline:
            raise EngineCrashed(f"{name} does not answer after {timeout_s:g} s: {problem}")
        await asyncio.sleep(poll_s)
        poll_s = min(2 * poll_s, _LAST_POLL_S)


async def check_logprobs(name: str, client: HttpClient, dialect: ServerDialect, silence_s: float) -> None:
    """Raise `ConfigError` where log-probabilities are the model's own, `EngineCrashed` where none come."""
    params = dialect.probe
    request = StreamRequest(
        key="headway-probe",
        prompt=[0, 1],
        max_tokens=params.max_new_tokens,
        params=params,
        end_tokens=(),
        label="probe",
    )
    logps: list[float] = []
    try:
        async with aclosing(client.stream(dialect.path, dialect.make_body(request), silence_s=silence_s)) as events:
            async for event in events:
                chunk = dialect.parse_event(event, len(logps))
                logps += chunk.logps
                if chunk.finish is not None:
                    break
    except StreamError as error:
        raise EngineCrashed(f"{name}: {error} (a server needs {dialect.hint})") from error
    if not logps:
        raise EngineCrashed(f"{name}: {client.url} answers without log-probabilities")
    spread = max(logps) - min(logps)
    if spread > _MOST_SPREAD and not all(map(is_tie, logps)):
        raise ConfigError(
            f"its log-probabilities are those before the temperature (they differ by {spread:.1f} where they must not)",
            key="actor_infer.strategy_args.strategy_config.url",
            value=client.url,
            hint=f"start the server with {dialect.hint}",
        )


def is_tie(logp: float) -> bool:
    """Return whether this is the log-probability of one of few tokens that are equally likely."""
    count = round(math.exp(min(-logp, _MOST_TIES)))
    return 1 <= count <= _MOST_TIES and abs(logp + math.log(count)) < _MOST_SPREAD / count
