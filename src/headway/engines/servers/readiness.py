"""Before a server is used: does it answer, and are its log-probabilities those of what it draws from?

A dialect names a way of drawing (`probe`) under which all tokens that can be drawn are equally likely, so that
log-probabilities of what is drawn from are all the same; the model's own differ. A model that has no doubts cannot be
told apart.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from headway.engines.servers.dialect import Asked, Dialect
from headway.engines.servers.link import Link, ServerLost, ServerRefused
from headway.engines.servers.process import Server
from headway.errors import ConfigError, EngineCrashed

_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0
_PROBE = "headway-probe"
_SPREAD = 0.1
"""Nats between the likeliest and the least likely of the tokens drawn."""


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
    """Raises `ConfigError` where they are the model's own, `EngineCrashed` where nothing comes."""
    params = dialect.probe
    asked = Asked(
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
    except (ServerLost, ServerRefused) as error:
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
