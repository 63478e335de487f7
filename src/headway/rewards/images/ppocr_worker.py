"""What worker processes do for `ocr`: read one line of text with the recogniser of PP-OCR.

Imported only there. The network is the `.onnx` file inside the package `rapidocr-onnxruntime`, run by onnxruntime on
one thread; that package itself is not imported, so that what it needs (OpenCV) need not be installed. Reads a picture
of one line; does not look for lines in a larger one.
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
_HEIGHT = 48
"""Of a line, in pixels, as the network was trained."""
_LONGEST = 2400


def prepare() -> None:
    """Load the network, outside the first call's time."""
    _session()


def read_json_image(height: int, width: int, pixels: str) -> str:
    """The text in a picture that came as JSON."""
    return read_text_line(json_to_array(height, width, pixels))


def read_text_line(pixels: NDArray[np.uint8]) -> str:
    """The text in the picture `uint8 [height, width, 3]`; empty where there is none."""
    session, letters = _session()
    scores = session.run(None, {session.get_inputs()[0].name: _line(pixels)[None]})[0][0]
    best = scores.argmax(-1)
    kept = [index for place, index in enumerate(best) if index and (not place or index != best[place - 1])]
    return "".join(letters[index] for index in kept)


def _line(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Three channels, 48 pixels high, −1 … 1."""
    height, width = pixels.shape[:2]
    wide = min(max(round(_HEIGHT * width / height), _HEIGHT), _LONGEST)
    image = Image.fromarray(pixels).resize((wide, _HEIGHT), Image.Resampling.BILINEAR)
    line = np.asarray(image, dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(line[:, :, ::-1].transpose(2, 0, 1))  # it was trained on blue, green, red


@cache
def _session() -> tuple[Any, list[str]]:
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
