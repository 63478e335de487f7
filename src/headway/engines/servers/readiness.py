"""Before a server is used: does it answer, and are its log-probabilities those of what it draws from?

At a temperature of ten thousand every token is as likely as any other, so log-probabilities that are taken after the
temperature are all the same; those taken before it are the model's own, and differ. A model to which all tokens are
alike cannot be told apart, and need not be.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from headway.engines.servers.dialect import Asked, Dialect
from headway.engines.servers.link import Link, ServerLost, ServerRefused
from headway.engines.servers.process import Server
from headway.errors import ConfigError, EngineCrashed
from headway.types import SamplingParams

_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0
_HOT = 1e4
_TOKENS = 8
_SPREAD = 0.5
"""Nats between the likeliest and the least likely of the tokens drawn: thousandths after the temperature."""


async def wait_until_ready(name: str, link: Link, server: Server, start_s: float) -> None:
    """Until it says that it is well. Raises `EngineCrashed` after `start_s`, or when it has ended."""
    loop = asyncio.get_running_loop()
    deadline, pause_s, said = loop.time() + start_s, _FIRST_LOOK_S, ""
    while True:
        try:
            await link.get("/health", timeout_s=max(min(5.0, deadline - loop.time()), 0.01))
            return
        except (ServerLost, ServerRefused) as error:
            said = str(error)
        if server.ended:
            raise EngineCrashed(server.ended)
        if loop.time() + pause_s > deadline:
            raise EngineCrashed(f"{name} does not answer after {start_s:g} s: {said}")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_LOOK_S)


async def check_logps(name: str, link: Link, dialect: Dialect, silence_s: float) -> None:
    """Raises `ConfigError` where they are taken before the temperature, `EngineCrashed` where nothing comes."""
    params = SamplingParams(max_new_tokens=_TOKENS, temperature=_HOT)
    asked = Asked(key="headway-probe", prompt=[0, 1], count=_TOKENS, params=params, ends=(), label="probe")
    logps: list[float] = []
    try:
        async with aclosing(link.events(dialect.path, dialect.body(asked), silence_s=silence_s)) as events:
            async for event in events:
                told = dialect.read(event, len(logps))
                logps += told.logps
                if told.finish is not None:
                    break
    except (ServerLost, ServerRefused) as error:
        raise EngineCrashed(f"{name}: {error} (a server needs {dialect.hint})") from error
    if not logps:
        raise EngineCrashed(f"{name}: {link.url} answers without log-probabilities")
    spread = max(logps) - min(logps)
    if spread > _SPREAD:
        raise ConfigError(
            f"its log-probabilities are those before the temperature (they differ by {spread:.1f} at one of {_HOT:g})",
            key="actor_infer.strategy_args.strategy_config.url",
            value=link.url,
            hint=f"start the server with {dialect.hint}",
        )
