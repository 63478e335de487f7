"""Reading a picture with Tesseract, a program of its own: a second opinion that nothing was trained against.

Needs `tesseract` on the path (`apt install tesseract-ocr`). The picture is enlarged and gets a margin, since Tesseract
was made for scanned pages and does not see letters of ten pixels or at the very edge.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from io import BytesIO

from headway.errors import ConfigError, RewardError
from headway.rewards.images.image_reward import image_to_array
from headway.types import Image

PROGRAM = "tesseract"
_LETTERS_HIGH = 64
"""A picture less high than this is enlarged to it."""
_MARGIN = 20


def require_tesseract() -> str:
    """Where the program is. Raises `ConfigError`."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise ConfigError("needs the program tesseract", key="reader", value=PROGRAM, hint="apt install tesseract-ocr")
    return found


def read_with_tesseract(image: Image, *, program: str = PROGRAM, alphabet: str = "", timeout_s: float = 20.0) -> str:
    """The line of text in the picture; blocking. `alphabet`: the letters that there may be, empty for any."""
    command = [program, "stdin", "stdout", "--psm", "7"]
    if alphabet:
        command += ["-c", f"tessedit_char_whitelist={alphabet}"]
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    try:
        done = subprocess.run(
            command, input=_enlarged(image), capture_output=True, env=environment, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise RewardError(f"tesseract: no verdict after {timeout_s} s") from None
    except OSError as error:
        raise RewardError(f"tesseract: {error}") from error
    if done.returncode:
        raise RewardError(f"tesseract: exit code {done.returncode}: {done.stderr[-300:].decode(errors='replace')}")
    return done.stdout.decode("utf-8", errors="replace").strip()


def _enlarged(image: Image) -> bytes:
    """A PNG of it, large enough, in a margin of the colour of its corners."""
    from PIL import Image as Pillow

    pixels = image_to_array(image)
    times = max(1, -(-_LETTERS_HIGH // image.height))
    large = Pillow.fromarray(pixels).convert("L")
    large = large.resize((large.width * times, large.height * times), Pillow.Resampling.BICUBIC)
    corners = sorted(int(pixels[y, x].mean()) for y in (0, -1) for x in (0, -1))
    page = Pillow.new("L", (large.width + 2 * _MARGIN, large.height + 2 * _MARGIN), corners[2])
    page.paste(large, (_MARGIN, _MARGIN))
    file = BytesIO()
    page.save(file, "PNG", compress_level=1)
    return file.getvalue()
