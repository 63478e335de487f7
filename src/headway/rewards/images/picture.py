"""The picture of an episode, and the forms it takes: array, PNG, JSON.

An engine leaves an `Image` with its last denoising step: red, green, blue, a byte each. Rewards get it as an array
`uint8 [height, width, 3]`, worker processes as JSON, servers as PNG. Guarantees: every form holds the same pixels;
what comes from outside is checked for its size before it is unpacked.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

from headway.errors import RewardError
from headway.rewards.function import verdict
from headway.types import Episode, Image, Score

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_PIXELS = 4096 * 4096
_SIGNATURE = b"\x89PNG\r\n\x1a\n"

ImageJudge = Callable[[Image, Mapping[str, Any]], Any]
"""A coroutine function of the picture and the task's data."""
Wired = tuple[int, int, str]
"""Height, width, and the bytes in base64: a picture as JSON, without packing it."""


class ImageReward:
    """A coroutine function of ours that judges the picture of an episode."""

    __slots__ = ("_judge", "_name")

    def __init__(self, name: str, judge: ImageJudge) -> None:
        self._name, self._judge = name, judge

    async def score(self, episode: Episode) -> Score:
        return verdict(self._name, await self._judge(image_of(episode), episode.task.data))


def image_of(episode: Episode) -> Image:
    """What the policy drew last. An episode without a picture has nothing to judge."""
    image = episode.turns[-1].generation.image if episode.turns else None
    if image is None:
        raise RewardError(f"{episode.sample_id}: the episode has no picture to judge")
    return image


def image_from(pixels: NDArray[np.uint8]) -> Image:
    """The record of an array `uint8 [height, width]`, `[height, width, 1]` or `[height, width, 3]`."""
    import numpy as np

    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ValueError(f"a picture is uint8 [height, width, 1 or 3], not {pixels.dtype} {list(pixels.shape)}")
    height, width = pixels.shape[:2]
    channels = np.broadcast_to(pixels.reshape(height, width, -1), (height, width, 3))
    return Image(height=height, width=width, pixels=channels.tobytes())


def pixels_of(image: Image) -> NDArray[np.uint8]:
    """`uint8 [height, width, 3]`. Raises `ValueError` where the bytes are too many or too few."""
    import numpy as np

    if not 0 < image.height * image.width <= MOST_PIXELS:
        raise ValueError(f"the picture is {image.width} × {image.height} pixels, at most {MOST_PIXELS} are looked at")
    return np.frombuffer(image.pixels, dtype=np.uint8).reshape(image.height, image.width, 3)


def wired(image: Image) -> Wired:
    """For a worker process."""
    return image.height, image.width, base64.b64encode(image.pixels).decode("ascii")


def unwired(height: int, width: int, pixels: str) -> NDArray[np.uint8]:
    """The array again, there."""
    return pixels_of(Image(height=height, width=width, pixels=_from_base64(pixels)))


def png_of(image: Image) -> bytes:
    """A PNG file, written by ourselves: what makes pictures need not have a library for them."""
    if len(image.pixels) != 3 * image.height * image.width:
        raise ValueError(f"{len(image.pixels)} bytes are no picture of {image.width} × {image.height} pixels")
    row = 3 * image.width
    rows = b"".join(b"\0" + image.pixels[start : start + row] for start in range(0, len(image.pixels), row))
    header = struct.pack(">IIBBBBB", image.width, image.height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def image_from_png(png: bytes) -> Image:
    """The picture of a PNG file. Raises `ValueError`."""
    import numpy as np
    from PIL import Image as Pillow

    if png[:8] != _SIGNATURE or len(png) < 24:
        raise ValueError("is no PNG")
    width, height = struct.unpack(">II", png[16:24])
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"the picture is {width} × {height} pixels, at most {MOST_PIXELS} are looked at")
    with Pillow.open(BytesIO(png), formats=("PNG",)) as opened:
        return image_from(np.array(opened.convert("RGB"), dtype=np.uint8))


def png_base64(image: Image) -> str:
    """For a server."""
    return base64.b64encode(png_of(image)).decode("ascii")


def image_from_base64(png: str) -> Image:
    """What `png_base64` gave. Raises `ValueError`."""
    return image_from_png(_from_base64(png))


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the picture is not base64: {error}") from error
