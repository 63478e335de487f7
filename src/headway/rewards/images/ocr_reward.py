"""Does the picture show the text it was asked for? Read by a recogniser in worker processes, beside generation.

Two readers: `ppocr`, a few milliseconds a picture, made to be trained against; `tesseract`, slower and of another
family, to judge what was trained against the first. A reader that fails or takes too long gives no verdict.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.rewards.answer_extraction import get_expected_answer
from headway.rewards.images import tesseract
from headway.rewards.images.image_reward import ImageReward, image_to_json
from headway.rewards.reward_worker_pool import RewardWorkerPool
from headway.rewards.thread_limiter import ThreadLimiter
from headway.types import Image

READERS = ("ppocr", "tesseract")
ImageReader = Callable[[Image], Awaitable[str]]

_NEEDED = ("onnxruntime", "rapidocr_onnxruntime", "numpy", "PIL")


def make_ocr_reward(
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
        target = str(get_expected_answer(data, answer))
        try:
            value = measure_agreement(target, await read(image))
        except ValueError as error:
            raise RewardError(f"ocr: {error}") from error
        return {"score": value, "exact": float(value == 1.0)}

    return ImageReward("ocr", judge)


def make_reader(reader: str, *, alphabet: str = "", timeout_s: float = 10.0, concurrency: int = 2) -> ImageReader:
    """A coroutine function that reads one picture. Raises `ConfigError` where it cannot work here."""
    if reader == "ppocr":
        _require_ppocr()
        workers = RewardWorkerPool(concurrency)

        async def by_worker(image: Image) -> str:
            function = "headway.rewards.images.ppocr_worker:read_json_image"
            return str(await workers.call(function, *image_to_json(image), timeout_s=timeout_s))

        return by_worker
    if reader == "tesseract":
        program, threads = tesseract.require_tesseract(), ThreadLimiter(concurrency, "reward ocr")

        async def by_program(image: Image) -> str:
            return await threads.run(
                tesseract.read_with_tesseract, image, program=program, alphabet=alphabet, timeout_s=timeout_s
            )

        return by_program
    raise ConfigError("is no reader", key="reader", value=reader, hint=f"one of {', '.join(READERS)}")


def _require_ppocr() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = "pip install 'headway[images]'; pip install --no-deps rapidocr-onnxruntime"
        raise ConfigError(f"needs {', '.join(missing)}", key="reader", value="ppocr", hint=hint)


def measure_agreement(target: str, found: str) -> float:
    """0 … 1. Raises `ValueError` for an empty target, which every picture would show."""
    wanted, read = fold_text(target), fold_text(found)
    if not wanted:
        raise ValueError(f"the target {target!r} has no letters to look for")
    if wanted in read:
        return 1.0
    return 1.0 - min(levenshtein_distance(wanted, read), len(wanted)) / len(wanted)


def fold_text(text: str) -> str:
    """Without case and white space."""
    return "".join(text.split()).casefold()


def levenshtein_distance(one: str, other: str) -> int:
    """Letters to insert, remove or replace."""
    row = list(range(len(other) + 1))
    for above, letter in enumerate(one, start=1):
        corner, row[0] = row[0], above
        for place, against in enumerate(other, start=1):
            corner, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, corner + (letter != against))
    return row[-1]
