"""Rewards as users write them, the right ones and the wrong ones."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from headway.types import Episode, Score


def by_length(text: str, data: dict[str, Any], *, per: float = 1.0) -> float:
    return len(text) / per


async def slowly(text: str, data: dict[str, Any]) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"score": 1.0, "words": len(text.split())}


def blocking(text: str, data: dict[str, Any]) -> bool:
    time.sleep(0.5)
    return True


def raising(text: str, data: dict[str, Any]) -> float:
    return data["absent"]  # type: ignore[no-any-return]


def returning(text: str, data: dict[str, Any]) -> Any:
    return {"none": None, "nan": float("nan"), "inf": float("-inf"), "text": "1.0", "list": [1], "dict": {"x": 1},
            "part": {"score": 1, "x": None}, "huge": 10**400, "complex": 1j}[text]  # fmt: skip


def leaving(text: str, data: dict[str, Any]) -> float:
    raise SystemExit(1)


def only_text(text: str) -> float:
    return 1.0


class Own:
    """A reward with the whole protocol."""

    def __init__(self, value: float = 2.0) -> None:
        self.value = value

    async def score(self, episode: Episode) -> Score:
        return Score(value=self.value)


NUMBER = 5
