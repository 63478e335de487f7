"""Engines that join and leave a simulated run at given times, through the same door as those of a real one.

A leave that is refused (the last engine in service stays) is an error in the log, and the run goes on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from headway.config.simulation import EngineChange
from headway.errors import ConfigError
from headway.flow.flow import AsyncTrainingFlow

_ENGINE = re.compile(r"engine/(\d+)")


class Changes:
    """Applies changes on the running loop while it is entered. `most`: engines that the run may come to have."""

    def __init__(self, changes: Iterable[EngineChange], flow: AsyncTrainingFlow, *, most: int) -> None:
        self._changes, self._flow = tuple(changes), flow
        self._timers: list[asyncio.TimerHandle] = []
        for index, change in enumerate(self._changes):
            _check(change, most, f"simulation.changes[{index}].engine")

    async def __aenter__(self) -> Changes:
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(change.at_s, self._apply, change) for change in self._changes]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for timer in self._timers:
            timer.cancel()

    def _apply(self, change: EngineChange) -> None:
        fleet = self._flow.fleet
        assert fleet is not None
        try:
            if change.engine is not None:
                fleet.remove(change.engine)
            else:
                fleet.scale(len(fleet.names) + (1 if change.kind == "join" else -1))
        except ConfigError as error:
            self._flow.events.emit("error", "fleet", error="ConfigError", message=str(error))


def _check(change: EngineChange, most: int, key: str) -> None:
    if change.engine is None:
        return
    if change.kind == "join":
        raise ConfigError("a newcomer gets the next free name", key=key, value=change.engine, hint="leave it out")
    found = _ENGINE.fullmatch(change.engine)
    if found is None or int(found[1]) >= most:
        raise ConfigError(f"there are at most {most} engines", key=key, value=change.engine, hint="engine/0")
