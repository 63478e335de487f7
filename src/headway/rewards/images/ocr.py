"""Does the picture show the text it was asked for? Read by a recogniser in worker processes, beside generation.

Two readers: `ppocr`, a few milliseconds a picture, made to be trained against; `tesseract`, slower and of another
family, to judge what was trained against the first. A reader that fails or takes too long gives no verdict.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.rewards.images import tesseract
from headway.rewards.images.picture import ImageReward, wired
from headway.rewards.images.reading import agreement
from headway.rewards.text import expected
from headway.rewards.threads import Threads
from headway.rewards.workers import Workers
from headway.types import Image

READERS = ("ppocr", "tesseract")
Read = Callable[[Image], Awaitable[str]]

_NEEDED = ("onnxruntime", "rapidocr_onnxruntime", "numpy", "PIL")


def ocr(
    *,
    answer: str = "answer",
    reader: str = "ppocr",
    alphabet: str = "",
    timeout_s: float = 10.0,
    concurrency: int = 2,
) -> ImageReward:
    """1 where the task's text is in the picture, else 1 − min(distance, length)/length, case and blanks aside.

    `alphabet`: the only letters that there can be (tesseract); `concurrency`: pictures that are read at a time.
    """
    read = make_reader(reader, alphabet=alphabet, timeout_s=timeout_s, concurrency=concurrency)

    async def judge(image: Image, data: Mapping[str, Any]) -> dict[str, float]:
        target = str(expected(data, answer))
        try:
            value = agreement(target, await read(image))
        except ValueError as error:
            raise RewardError(f"ocr: {error}") from error
        return {"score": value, "exact": float(value == 1.0)}

    return ImageReward("ocr", judge)


def make_reader(reader: str, *, alphabet: str = "", timeout_s: float = 10.0, concurrency: int = 2) -> Read:
    """A coroutine function that reads one picture. Raises `ConfigError` where it cannot work here."""
    if reader == "ppocr":
        _require_ppocr()
        workers = Workers(concurrency)

        async def by_worker(image: Image) -> str:
            function = "headway.rewards.images.recogniser:read_wired"
            return str(await workers.call(function, *wired(image), timeout_s=timeout_s))

        return by_worker
    if reader == "tesseract":
        program, threads = tesseract.require_tesseract(), Threads(concurrency, "reward ocr")

        async def by_program(image: Image) -> str:
            return await threads.run(tesseract.read, image, program=program, alphabet=alphabet, timeout_s=timeout_s)

        return by_program
    raise ConfigError("is no reader", key="reader", value=reader, hint=f"one of {', '.join(READERS)}")


def _require_ppocr() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = "pip install 'headway[images]'; pip install --no-deps rapidocr-onnxruntime"
        raise ConfigError(f"needs {', '.join(missing)}", key="reader", value="ppocr", hint=hint)
