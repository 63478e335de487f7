"""The part of the OCR reward that runs in worker processes: it reads one line of text with PP-OCR.

Only workers import this module. The network is the `.onnx` file inside the package `rapidocr-onnxruntime`, run by
onnxruntime on one thread. That package itself is not imported, so its dependencies (OpenCV) need not be installed. The
network reads a picture of one line; it does not look for lines in a larger picture.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from headway.rewards.images.image_reward import json_to_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

PACKAGE = "rapidocr_onnxruntime"
_MODEL = "models/ch_PP-OCRv4_rec_infer.onnx"
_LINE_HEIGHT, _MAX_LINE_WIDTH = 48, 2400
"""Size of a line in pixels, as the network was trained."""


def prepare() -> None:
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
    height, width = pixels.shape[:2]
    line_width = min(max(round(_LINE_HEIGHT * width / height), _LINE_HEIGHT), _MAX_LINE_WIDTH)
    image = Image.fromarray(pixels).resize((line_width, _LINE_HEIGHT), Image.Resampling.BILINEAR)
    line = np.asarray(image, dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(line[:, :, ::-1].transpose(2, 0, 1))  # the network was trained on blue, green, red


@cache
def _load_session() -> tuple[Any, list[str]]:
    import onnxruntime

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    file = Path(spec.submodule_search_locations[0]) / _MODEL
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    letters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    return session, ["", *letters, " "]
