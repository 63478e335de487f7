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

from headway.errors import ConfigError, RewardError
from headway.rewards.function_reward import result_to_score
from headway.rewards.thread_limiter import ThreadLimiter
from headway.types import Episode, Image, Score

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MAX_PIXELS = 4096 * 4096
_SIGNATURE = b"\x89PNG\r\n\x1a\n"

ImageScorer = Callable[[Image, Mapping[str, Any]], Any]
"""A coroutine function of the picture and the task's data."""
ImageJson = tuple[int, int, str]
"""Height, width, and the bytes in base64: a picture as JSON, without packing it."""


class ImageReward:
    """A coroutine function of ours that judges the picture of an episode."""

    __slots__ = ("_judge", "_name")

    def __init__(self, name: str, judge: ImageScorer) -> None:
        self._name, self._judge = name, judge

    async def score(self, episode: Episode) -> Score:
        return result_to_score(self._name, await self._judge(get_episode_image(episode), episode.task.data))


def get_episode_image(episode: Episode) -> Image:
    """What the policy drew last. An episode without a picture has nothing to judge."""
    image = episode.turns[-1].generation.image if episode.turns else None
    if image is None:
        raise RewardError(f"{episode.sample_id}: the episode has no picture to judge")
    return image


def array_to_image(pixels: NDArray[np.uint8]) -> Image:
    """The record of an array `uint8 [height, width]`, `[height, width, 1]` or `[height, width, 3]`."""
    import numpy as np

    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ValueError(f"a picture is uint8 [height, width, 1 or 3], not {pixels.dtype} {list(pixels.shape)}")
    height, width = pixels.shape[:2]
    channels = np.broadcast_to(pixels.reshape(height, width, -1), (height, width, 3))
    return Image(height=height, width=width, pixels=channels.tobytes())


def image_to_array(image: Image) -> NDArray[np.uint8]:
    """`uint8 [height, width, 3]`. Raises `ValueError` where the bytes are too many or too few."""
    import numpy as np

    if not 0 < image.height * image.width <= MAX_PIXELS:
        raise ValueError(f"the picture is {image.width} × {image.height} pixels, at most {MAX_PIXELS} are looked at")
    return np.frombuffer(image.pixels, dtype=np.uint8).reshape(image.height, image.width, 3)


def image_to_json(image: Image) -> ImageJson:
    """For a worker process."""
    return image.height, image.width, base64.b64encode(image.pixels).decode("ascii")


def json_to_array(height: int, width: int, pixels: str) -> NDArray[np.uint8]:
    """The array again, there."""
    return image_to_array(Image(height=height, width=width, pixels=_from_base64(pixels)))


def encode_png(image: Image) -> bytes:
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


def decode_png(png: bytes) -> Image:
    """The picture of a PNG file. Raises `ValueError`."""
    import numpy as np
    from PIL import Image as Pillow

    if png[:8] != _SIGNATURE or len(png) < 24:
        raise ValueError("is no PNG")
    width, height = struct.unpack(">II", png[16:24])
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"the picture is {width} × {height} pixels, at most {MAX_PIXELS} are looked at")
    with Pillow.open(BytesIO(png), formats=("PNG",)) as opened:
        return array_to_image(np.array(opened.convert("RGB"), dtype=np.uint8))


def image_to_png_base64(image: Image) -> str:
    """For a server."""
    return base64.b64encode(encode_png(image)).decode("ascii")


def png_base64_to_image(png: str) -> Image:
    """What `image_to_png_base64` gave. Raises `ValueError`."""
    return decode_png(_from_base64(png))


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the picture is not base64: {error}") from error


def make_compressibility_reward(*, quality: int = 95, concurrency: int = 2) -> ImageReward:
    """Minus the kilobytes of the picture as JPEG of that quality; with a weight of −1, incompressibility."""
    if not 1 <= quality <= 100:
        raise ConfigError("is no quality of JPEG", key="quality", value=quality, hint="1 to 100")
    threads = ThreadLimiter(concurrency, "reward compressibility")

    async def judge(image: Image, data: Mapping[str, Any]) -> float:
        return -await threads.run(measure_jpeg_bytes, image, quality) / 1000

    return ImageReward("compressibility", judge)


def measure_jpeg_bytes(image: Image, quality: int) -> int:
    """Length of the file. Pillow lets other threads run while it packs."""
    from PIL import Image as Pillow

    file = BytesIO()
    Pillow.fromarray(image_to_array(image)).save(file, "JPEG", quality=quality)
    return len(file.getvalue())
