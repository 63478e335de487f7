"""OCR reward: whether a picture shows the text it was asked for.

There are two readers. `ppocr` takes a few milliseconds per picture, in worker processes, and is meant for training.
It reads one line and does not look for lines in a larger picture.
`tesseract` is slower and of another family: it judges what was trained against the first reader. It needs the program
`tesseract` on the path (`apt install tesseract-ocr`). A reader that fails or takes too long gives no score.

The score is 1 if the text that was read contains the target, else 1 − min(distance, length)/length of the target,
with Levenshtein's distance. Case and white space do not count.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, RewardError
from headway.rewards.base import get_expected_answer
from headway.rewards.function_reward import BuiltInReward
from headway.rewards.images.image_reward import get_episode_image, image_to_array, image_to_json, json_to_array
from headway.rewards.reward_worker_pool import RewardWorkerPool
from headway.rewards.thread_limiter import ThreadLimiter
from headway.types import Image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

READERS = ("ppocr", "tesseract")
ImageReader = Callable[[Image], Awaitable[str]]

_PPOCR_PACKAGE, _PPOCR_MODEL = "rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"
"""Only the network inside the package is used; onnxruntime runs it on one thread."""
_LINE_HEIGHT, _MAX_LINE_WIDTH = 48, 2400
"""Size of a line in pixels, as the network was trained."""
_MIN_HEIGHT = 64
"""Pictures less high than this are enlarged: Tesseract was made for scanned pages."""
_MARGIN = 20
"""Pixels around the picture: Tesseract does not see letters at the very edge."""


def make_ocr_reward(
    *, answer: str = "answer", reader: str = "ppocr", alphabet: str = "", timeout_s: float = 10.0, concurrency: int = 2
) -> BuiltInReward:
    """Score how well the picture shows the task's text.

    `alphabet`: the only letters that can occur (tesseract); `concurrency`: pictures that are read at a time.
    """
    read = make_reader(reader, alphabet=alphabet, timeout_s=timeout_s, concurrency=concurrency)

    async def score(image: Image, data: Mapping[str, Any]) -> dict[str, float]:
        target = str(get_expected_answer(data, answer))
        try:
            value = measure_agreement(target, await read(image))
        except ValueError as error:
            raise RewardError(f"ocr: {error}") from error
        return {"score": value, "exact": float(value == 1.0)}

    return BuiltInReward("ocr", score, view=get_episode_image)


def make_reader(reader: str, *, alphabet: str = "", timeout_s: float = 10.0, concurrency: int = 2) -> ImageReader:
    """Return a coroutine function that reads one picture. Raises `ConfigError` if the reader is not installed."""
    if reader == "ppocr":
        _require_ppocr()
        workers = RewardWorkerPool(concurrency)

        async def read_in_worker(image: Image) -> str:
            return str(await workers.call(f"{__name__}:read_json_image", *image_to_json(image), timeout_s=timeout_s))

        return read_in_worker
    if reader == "tesseract":
        program, threads = require_tesseract(), ThreadLimiter(concurrency, "reward ocr")

        async def read_on_thread(image: Image) -> str:
            return await threads.run(
                read_with_tesseract, image, program=program, alphabet=alphabet, timeout_s=timeout_s
            )

        return read_on_thread
    raise ConfigError("is no reader", key="reader", value=reader, hint=f"one of {', '.join(READERS)}")


def _require_ppocr() -> None:
    missing = [
        name for name in ("onnxruntime", _PPOCR_PACKAGE, "numpy", "PIL") if importlib.util.find_spec(name) is None
    ]
    if missing:
        hint = "pip install 'headway[images]'; pip install --no-deps rapidocr-onnxruntime"
        raise ConfigError(f"needs {', '.join(missing)}", key="reader", value="ppocr", hint=hint)


def prepare_read_json_image() -> None:
    """Load the network before the time of the first call starts."""
    _load_session()


def read_json_image(height: int, width: int, pixels: str) -> str:
    """Return the text in a picture that came as JSON."""
    return read_text_line(json_to_array(height, width, pixels))


def read_text_line(pixels: NDArray[np.uint8]) -> str:
    """Return the text in the picture `uint8 [height, width, 3]`; empty if there is none."""
    session, letters = _load_session()
    scores = session.run(None, {session.get_inputs()[0].name: _prepare_line(pixels)[None]})[0][0]
    best = scores.argmax(-1)
    changes = [index for at, index in enumerate(best) if index and (not at or index != best[at - 1])]
    return "".join(letters[index] for index in changes)


def _prepare_line(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the line with three channels, 48 pixels high, in −1 … 1."""
    import numpy as np
    from PIL import Image as Pillow

    height, width = pixels.shape[:2]
    line_width = min(max(round(_LINE_HEIGHT * width / height), _LINE_HEIGHT), _MAX_LINE_WIDTH)
    image = Pillow.fromarray(pixels).resize((line_width, _LINE_HEIGHT), Pillow.Resampling.BILINEAR)
    line = np.asarray(image, dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(line[:, :, ::-1].transpose(2, 0, 1))  # the network was trained on blue, green, red


@cache
def _load_session() -> tuple[Any, list[str]]:
    import onnxruntime

    spec = importlib.util.find_spec(_PPOCR_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {_PPOCR_PACKAGE} is not installed")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    file = Path(spec.submodule_search_locations[0]) / _PPOCR_MODEL
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    letters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    return session, ["", *letters, " "]


def require_tesseract() -> str:
    """Return the path of the program. Raises `ConfigError` if it is not installed."""
    found = shutil.which("tesseract")
    if found is None:
        hint = "apt install tesseract-ocr"
        raise ConfigError("needs the program tesseract", key="reader", value="tesseract", hint=hint)
    return found


def read_with_tesseract(
    image: Image, *, program: str = "tesseract", alphabet: str = "", timeout_s: float = 20.0
) -> str:
    """Return the line of text in the picture; blocking. `alphabet`: the letters that can occur, empty for any."""
    command = [program, "stdin", "stdout", "--psm", "7"]
    if alphabet:
        command += ["-c", f"tessedit_char_whitelist={alphabet}"]
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    try:
        done = subprocess.run(
            command, input=_enlarge(image), capture_output=True, env=environment, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise RewardError(f"tesseract: no verdict after {timeout_s} s") from None
    except OSError as error:
        raise RewardError(f"tesseract: {error}") from error
    if done.returncode:
        raise RewardError(f"tesseract: exit code {done.returncode}: {done.stderr[-300:].decode(errors='replace')}")
    return done.stdout.decode("utf-8", errors="replace").strip()


def _enlarge(image: Image) -> bytes:
    """Return a PNG of the picture, large enough, with a margin in the colour of its corners."""
    from PIL import Image as Pillow

    pixels = image_to_array(image)
    times = max(1, -(-_MIN_HEIGHT // image.height))
    large = Pillow.fromarray(pixels).convert("L")
    large = large.resize((large.width * times, large.height * times), Pillow.Resampling.BICUBIC)
    corners = sorted(int(pixels[y, x].mean()) for y in (0, -1) for x in (0, -1))
    page = Pillow.new("L", (large.width + 2 * _MARGIN, large.height + 2 * _MARGIN), corners[2])
    page.paste(large, (_MARGIN, _MARGIN))
    file = BytesIO()
    page.save(file, "PNG", compress_level=1)
    return file.getvalue()


def measure_agreement(target: str, found: str) -> float:
    """Return the score of the text that was read, 0 … 1. Raises `ValueError` for a target without letters."""
    folded_target, folded = _fold(target), _fold(found)
    if not folded_target:
        raise ValueError(f"the target {target!r} has no letters to look for")
    if folded_target in folded:
        return 1.0
    return 1.0 - min(levenshtein_distance(folded_target, folded), len(folded_target)) / len(folded_target)


def _fold(text: str) -> str:
    """Remove case and white space."""
    return "".join(text.split()).casefold()


def levenshtein_distance(one: str, other: str) -> int:
    """Return how many letters have to be inserted, removed or replaced."""
    row = list(range(len(other) + 1))
    for above, letter in enumerate(one, start=1):
        corner, row[0] = row[0], above
        for at, against in enumerate(other, start=1):
            corner, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, corner + (letter != against))
    return row[-1]
