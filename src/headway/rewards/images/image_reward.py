"""The picture of an episode, its conversion to arrays, PNG and JSON, and the compressibility reward.

An engine returns an `Image` with the last denoising step: red, green, blue, a byte each. Rewards get it as an array
`uint8 [height, width, 3]`, worker processes as JSON, servers as PNG. Guarantees: every form holds the same pixels; the
size of a picture from outside is checked before it is unpacked.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, RewardError
from headway.rewards.scoring_functions import BuiltInReward
from headway.rewards.thread_limiter import ThreadLimiter
from headway.types import Episode, Image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_PIXELS = 4096 * 4096
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

ImageJson = tuple[int, int, str]
"""Height, width, and the pixels in base64: a picture as JSON, without compression."""


def get_episode_image(episode: Episode) -> Image:
    """Return the picture of the last turn. Raises `RewardError` for an episode without a picture."""
    image = episode.turns[-1].generation.image if episode.turns else None
    if image is None:
        raise RewardError(f"{episode.sample_id}: the episode has no picture to judge")
    return image


def array_to_image(pixels: NDArray[np.uint8]) -> Image:
    """Return the record of an array `uint8 [height, width]`, `[height, width, 1]` or `[height, width, 3]`."""
    import numpy as np

    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ValueError(f"a picture is uint8 [height, width, 1 or 3], not {pixels.dtype} {list(pixels.shape)}")
    height, width = pixels.shape[:2]
    channels = np.broadcast_to(pixels.reshape(height, width, -1), (height, width, 3))
    return Image(height=height, width=width, pixels=channels.tobytes())


def image_to_array(image: Image) -> NDArray[np.uint8]:
    """Return `uint8 [height, width, 3]`. Raises `ValueError` if the number of bytes is wrong or too large."""
    import numpy as np

    if not 0 < image.height * image.width <= MAX_PIXELS:
        raise ValueError(f"the picture is {image.width} × {image.height} pixels, at most {MAX_PIXELS} are looked at")
    return np.frombuffer(image.pixels, dtype=np.uint8).reshape(image.height, image.width, 3)


def image_to_json(image: Image) -> ImageJson:
    """Return the picture as arguments of a worker process."""
    return image.height, image.width, base64.b64encode(image.pixels).decode("ascii")


def json_to_array(height: int, width: int, pixels: str) -> NDArray[np.uint8]:
    """Return the array of what `image_to_json` gave."""
    return image_to_array(Image(height=height, width=width, pixels=_from_base64(pixels)))


def encode_png(image: Image) -> bytes:
    """Return a PNG file. It needs no library, so that machines that only draw pictures need none."""
    if len(image.pixels) != 3 * image.height * image.width:
        raise ValueError(f"{len(image.pixels)} bytes are no picture of {image.width} × {image.height} pixels")
    row = 3 * image.width
    rows = b"".join(b"\0" + image.pixels[start : start + row] for start in range(0, len(image.pixels), row))
    header = struct.pack(">IIBBBBB", image.width, image.height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return _PNG_SIGNATURE + b"".join(_make_png_chunk(kind, data) for kind, data in chunks)


def _make_png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def decode_png(png: bytes) -> Image:
    """Return the picture of a PNG file. Raises `ValueError`."""
    import numpy as np
    from PIL import Image as Pillow

    if png[:8] != _PNG_SIGNATURE or len(png) < 24:
        raise ValueError("is no PNG")
    width, height = struct.unpack(">II", png[16:24])
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"the picture is {width} × {height} pixels, at most {MAX_PIXELS} are looked at")
    with Pillow.open(BytesIO(png), formats=("PNG",)) as opened:
        return array_to_image(np.array(opened.convert("RGB"), dtype=np.uint8))


def downscale_image(image: Image, longest_side: int) -> Image:
    """Return every nth pixel of the image, so that no side is longer than `longest_side`."""
    step = -(-max(image.height, image.width) // longest_side)
    if step == 1:
        return image
    rows, wide = range(0, image.height, step), 3 * image.width
    pixels = b"".join(
        image.pixels[row * wide + 3 * column : row * wide + 3 * column + 3]
        for row in rows
        for column in range(0, image.width, step)
    )
    return Image(height=len(rows), width=len(range(0, image.width, step)), pixels=pixels)


def image_to_png_base64(image: Image) -> str:
    """Return the picture as PNG in base64, as servers get it."""
    return base64.b64encode(encode_png(image)).decode("ascii")


def png_base64_to_image(png: str) -> Image:
    """Return the picture of what `image_to_png_base64` gave. Raises `ValueError`."""
    return decode_png(_from_base64(png))


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the picture is not base64: {error}") from error


def make_compressibility_reward(*, quality: int = 95, concurrency: int = 2) -> BuiltInReward:
    """Score minus the kilobytes of the picture as JPEG of that quality; a weight of −1 gives incompressibility."""
    if not 1 <= quality <= 100:
        raise ConfigError("is no quality of JPEG", key="quality", value=quality, hint="1 to 100")
    threads = ThreadLimiter(concurrency, "reward compressibility")

    async def score(image: Image, data: Mapping[str, Any]) -> float:
        return -await threads.run(measure_jpeg_bytes, image, quality) / 1000

    return BuiltInReward("compressibility", score, view=get_episode_image)


def measure_jpeg_bytes(image: Image, quality: int) -> int:
    """Return the length of the JPEG file. Pillow lets other threads run while it compresses."""
    from PIL import Image as Pillow

    file = BytesIO()
    Pillow.fromarray(image_to_array(image)).save(file, "JPEG", quality=quality)
    return len(file.getvalue())
