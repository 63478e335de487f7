"""How small a picture gets as JPEG: a reward without a model, for trying things out and for tests of scale."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from headway.errors import ConfigError
from headway.rewards.images.picture import ImageReward, pixels_of
from headway.rewards.threads import Threads
from headway.types import Image


def compressibility(*, quality: int = 95, concurrency: int = 2) -> ImageReward:
    """Minus the kilobytes of the picture as JPEG of that quality; with a weight of −1, incompressibility."""
    if not 1 <= quality <= 100:
        raise ConfigError("is no quality of JPEG", key="quality", value=quality, hint="1 to 100")
    threads = Threads(concurrency, "reward compressibility")

    async def judge(image: Image, data: Mapping[str, Any]) -> float:
        return -await threads.run(jpeg_bytes, image, quality) / 1000

    return ImageReward("compressibility", judge)


def jpeg_bytes(image: Image, quality: int) -> int:
    """Length of the file. Pillow lets other threads run while it packs."""
    from PIL import Image as Pillow

    file = BytesIO()
    Pillow.fromarray(pixels_of(image)).save(file, "JPEG", quality=quality)
    return len(file.getvalue())
