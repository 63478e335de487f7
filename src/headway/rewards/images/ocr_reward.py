"""OCR reward: whether a picture shows the text it was asked for.

There are two readers. `ppocr` runs in worker processes and is meant for training. `tesseract` is of another family: it
judges what was trained against the first reader. It needs the program `tesseract` on the path (`apt install
tesseract-ocr`). A reader that fails or takes too long gives no score.

There are two layouts. A `line` fills the picture and is read at once, in a few milliseconds. On a `page`, which is any
ordinary picture, lines are found first: by the detection network of PP-OCR (`text_detection`), or by Tesseract's page
segmentation, which misses more on a busy ground. `auto` takes pictures of up to 64 pixels in height for a line.

The score is 1 if the text that was read contains the target, else 1 − min(distance, length)/length of the target,
with Levenshtein's distance. Case and white space do not count.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, RewardError
from headway.extras import suggest_install
from headway.rewards.base import get_expected_answer
from headway.rewards.images.image_reward import get_episode_image, image_to_array, image_to_json, json_to_array
from headway.rewards.images.text_detection import find_text_boxes
from headway.rewards.reward_worker_pool import RewardWorkerPool
from headway.rewards.scoring_functions import BuiltInReward
from headway.rewards.thread_limiter import ThreadLimiter
from headway.types import Image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

READERS = ("ppocr", "tesseract")
LAYOUTS = ("auto", "line", "page")
ImageReader = Callable[[Image], Awaitable[str]]

_PPOCR_PACKAGE = "rapidocr_onnxruntime"
_RECOGNITION_MODEL, _DETECTION_MODEL = "models/ch_PP-OCRv4_rec_infer.onnx", "models/ch_PP-OCRv4_det_infer.onnx"
"""Only the networks inside the package are used; onnxruntime runs them on one thread."""
_TALLEST_LINE = 64
"""Height up to which a picture is taken for one line."""
_LEAST_CONFIDENCE = 0.5
"""A line or word on a page that a reader is less sure of than this is a pattern and no text."""
_LINE_MODE, _PAGE_MODES = "7", ("3", "11")
"""Tesseract's page segmentation modes: a single line; a page with columns and paragraphs, and sparse text."""
_LINE_HEIGHT, _MAX_LINE_WIDTH = 48, 2400
"""Size of a line in pixels, as the network was trained."""
_MIN_HEIGHT = 64
"""Pictures less high than this are enlarged: Tesseract was made for scanned pages."""
_MARGIN = 20
"""Pixels around the picture: Tesseract does not see letters at the very edge."""


def make_ocr_reward(
    *,
    answer: str = "answer",
    reader: str = "ppocr",
    layout: str = "auto",
    alphabet: str = "",
    timeout_s: float = 10.0,
    concurrency: int = 2,
) -> BuiltInReward:
    """Score how well the picture shows the task's text.

    `alphabet`: the only letters that can occur (tesseract); `concurrency`: pictures that are read at a time.
    """
    read = make_reader(reader, layout=layout, alphabet=alphabet, timeout_s=timeout_s, concurrency=concurrency)

    async def score(image: Image, data: Mapping[str, Any]) -> dict[str, float]:
        target = str(get_expected_answer(data, answer))
        try:
            value = measure_agreement(target, await read(image))
        except ValueError as error:
            raise RewardError(f"ocr: {error}") from error
        return {"score": value, "exact": float(value == 1.0)}

    return BuiltInReward("ocr", score, view=get_episode_image)


def make_reader(
    reader: str, *, layout: str = "auto", alphabet: str = "", timeout_s: float = 10.0, concurrency: int = 2
) -> ImageReader:
    """Return a coroutine function that reads one picture. Raises `ConfigError` if the reader is not installed."""
    if layout not in LAYOUTS:
        raise ConfigError("is no layout", key="layout", value=layout, hint=f"one of {', '.join(LAYOUTS)}")
    if reader == "ppocr":
        _require_ppocr()
        workers = RewardWorkerPool(concurrency)

        async def read_in_worker(image: Image) -> str:
            arguments = (*image_to_json(image), is_page(image, layout))
            return str(await workers.call(f"{__name__}:read_json_image", *arguments, timeout_s=timeout_s))

        return read_in_worker
    if reader == "tesseract":
        program, threads = require_tesseract(), ThreadLimiter(concurrency, "reward ocr")

        async def read_on_thread(image: Image) -> str:
            return await threads.run(
                read_with_tesseract,
                image,
                page=is_page(image, layout),
                program=program,
                alphabet=alphabet,
                timeout_s=timeout_s,
            )

        return read_on_thread
    raise ConfigError("is no reader", key="reader", value=reader, hint=f"one of {', '.join(READERS)}")


def is_page(image: Image, layout: str) -> bool:
    """Return whether lines have to be found in the picture, as opposed to one line that fills it."""
    return image.height > _TALLEST_LINE if layout == "auto" else layout == "page"


def _require_ppocr() -> None:
    missing = [
        name for name in ("onnxruntime", _PPOCR_PACKAGE, "numpy", "PIL") if importlib.util.find_spec(name) is None
    ]
    if missing:
        hint = f"{suggest_install('images')}; pip install --no-deps rapidocr-onnxruntime"
        raise ConfigError(f"needs {', '.join(missing)}", key="reader", value="ppocr", hint=hint)


def prepare_read_json_image() -> None:
    """Load the networks before the time of the first call starts."""
    _load_session(_RECOGNITION_MODEL)
    _load_session(_DETECTION_MODEL)


def read_json_image(height: int, width: int, pixels: str, page: bool = False) -> str:
    """Return the text in a picture that came as JSON."""
    array = json_to_array(height, width, pixels)
    return read_text_page(array) if page else read_text_line(array)


def read_text_line(pixels: NDArray[np.uint8]) -> str:
    """Return the text in the picture `uint8 [height, width, 3]` that a line fills; empty if there is none."""
    return _recognize_line(pixels)[0]


def read_text_page(pixels: NDArray[np.uint8]) -> str:
    """Find the lines in the picture `uint8 [height, width, 3]`. Return their texts in reading order, a line each."""

    def classify(network_input: NDArray[np.float32]) -> NDArray[np.float32]:
        session = _load_session(_DETECTION_MODEL)
        scores: NDArray[np.float32] = session.run(None, {session.get_inputs()[0].name: network_input[None]})[0][0, 0]
        return scores

    crops = [pixels[box.top : box.bottom, box.left : box.right] for box in find_text_boxes(pixels, classify)]
    lines = [max(map(_recognize_line, _turn_upright(crop)), key=lambda line: line[1]) for crop in crops]
    return "\n".join(text for text, confidence in lines if confidence >= _LEAST_CONFIDENCE)


def _turn_upright(crop: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Return the crop of a line; that of a vertical line turned to either side."""
    turned = crop.swapaxes(0, 1)
    return [turned[::-1], turned[:, ::-1]] if crop.shape[0] > 1.5 * crop.shape[1] else [crop]


def _recognize_line(pixels: NDArray[np.uint8]) -> tuple[str, float]:
    """Return the text of a line and how sure the network is of its letters, 0 … 1."""
    session = _load_session(_RECOGNITION_MODEL)
    letters = _list_letters()
    scores = session.run(None, {session.get_inputs()[0].name: _prepare_line(pixels)[None]})[0][0]
    best = scores.argmax(-1)
    places = [at for at, index in enumerate(best) if index and (not at or index != best[at - 1])]
    confidence = float(scores[places, best[places]].mean()) if places else 0.0
    return "".join(letters[best[at]] for at in places), confidence


@cache
def _list_letters() -> list[str]:
    metadata = _load_session(_RECOGNITION_MODEL).get_modelmeta().custom_metadata_map
    return ["", *metadata["character"].splitlines(), " "]


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
def _load_session(model: str) -> Any:
    import onnxruntime

    spec = importlib.util.find_spec(_PPOCR_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {_PPOCR_PACKAGE} is not installed")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    file = Path(spec.submodule_search_locations[0]) / model
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def require_tesseract() -> str:
    """Return the path of the program. Raises `ConfigError` if it is not installed."""
    found = shutil.which("tesseract")
    if found is None:
        hint = "apt install tesseract-ocr"
        raise ConfigError("needs the program tesseract", key="reader", value="tesseract", hint=hint)
    return found


def read_with_tesseract(
    image: Image, *, page: bool = False, program: str = "tesseract", alphabet: str = "", timeout_s: float = 20.0
) -> str:
    """Return the text in the picture; blocking. `alphabet`: the letters that can occur, empty for any.

    A page is read in each of the page modes, and the reading counts that Tesseract is surest of.
    """
    options = ["-c", f"tessedit_char_whitelist={alphabet}"] if alphabet else []
    command, png, until = [program, "stdin", "stdout"], _enlarge(image), time.monotonic() + timeout_s
    if not page:
        return _run_tesseract([*command, "--psm", _LINE_MODE, *options], png, timeout_s).strip()
    tables = [
        _run_tesseract([*command, "--psm", mode, *options, "tsv"], png, until - time.monotonic())
        for mode in _PAGE_MODES
    ]
    words = max(map(_list_certain_words, tables), key=lambda words: sum(sure * len(word) for sure, word in words))
    return " ".join(word for _, word in words)


def _run_tesseract(command: list[str], png: bytes, timeout_s: float) -> str:
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    try:
        done = subprocess.run(
            command, input=png, capture_output=True, env=environment, timeout=max(timeout_s, 0.001), check=False
        )
    except subprocess.TimeoutExpired:
        raise RewardError(f"tesseract: no verdict in time ({timeout_s:.3g} s)") from None
    except OSError as error:
        raise RewardError(f"tesseract: {error}") from error
    if done.returncode:
        raise RewardError(f"tesseract: exit code {done.returncode}: {done.stderr[-300:].decode(errors='replace')}")
    return done.stdout.decode("utf-8", errors="replace")


def _list_certain_words(table: str) -> list[tuple[float, str]]:
    """Return the words of Tesseract's table that it is sure of. A row ends with confidence in per cent and text."""
    rows = [line.split("\t")[10:12] for line in table.splitlines()[1:]]
    words = [(float(row[0]) / 100, row[1]) for row in rows if len(row) == 2 and row[1].strip()]
    return [(sure, word) for sure, word in words if sure >= _LEAST_CONFIDENCE]


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
