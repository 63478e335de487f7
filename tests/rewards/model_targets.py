"""What serves in the processes of the tests: it answers, hangs, or dies as it is told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, RewardError


class Obedient:
    def __init__(self, notes: Path) -> None:
        self._notes = notes

    async def score(self, conversation: Sequence[Mapping[str, str]]) -> float:
        text = conversation[-1]["content"]
        with self._notes.open("a") as file:
            file.write(f"{text}\n")
        asked = self._notes.read_text().splitlines().count(text)
        if text == "die" or (text.startswith("die once") and asked == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "hang":
            await asyncio.sleep(1000)
        if text == "refuse":
            raise RewardError("too long")
        await asyncio.sleep(0.05)
        return float(len(text))


def serve(args: Mapping[str, Any]) -> Obedient:
    return Obedient(Path(args["notes"]))


def refuse(args: Mapping[str, Any]) -> Obedient:
    raise ConfigError("is no model", key="model_args", value=args["notes"])
