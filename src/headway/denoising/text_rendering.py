"""Strings drawn as small pictures: dark letters on a light background, with optional clutter.

The font is the one inside Pillow, so the same text, style and random generator give the same picture with the same
Pillow. Guarantees: the whole text lies inside the picture; wrong letters come from the alphabet. Pictures are
`uint8 [height, width, 1]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from headway.errors import ConfigError
from headway.seeding import Rng

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIGITS = "0123456789"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextImageStyle:
    """Size, alphabet and clutter of drawn texts."""

    height: int = 16
    width: int = 32
    alphabet: str = DIGITS
    wrong: float = 0.0
    """Probability that a letter in the picture is not that of the caption."""
    strokes: float = 0.0
    """Probability of a dark stroke across the picture."""
    blots: int = 0
    """Largest number of grey blots under the text."""
    tilt: float = 0.0
    """Largest rotation of the text in degrees, either way."""
    jitter: int = 1
    """Largest offset of the text from the middle in pixels, either way."""

    def __post_init__(self) -> None:
        if self.height < 8 or self.width < 8:
            raise ConfigError("must be at least 8 × 8", key="height × width", value=f"{self.height} × {self.width}")
        if len(set(self.alphabet)) != len(self.alphabet) or len(self.alphabet) < 2 or " " in self.alphabet:
            raise ConfigError("needs two or more different letters", key="alphabet", value=self.alphabet)
        for name in ("wrong", "strokes"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError("is no probability", key=name, value=getattr(self, name))


def render_text(text: str, style: TextImageStyle, rng: Rng) -> NDArray[np.uint8]:
    """Draw `text` with the clutter of `style`."""
    shown = "".join(_draw_wrong_letter(letter, style, rng) if rng.random() < style.wrong else letter for letter in text)
    paper = Image.new("L", (style.width, style.height), rng.randrange(240, 256))
    draw = ImageDraw.Draw(paper)
    for _ in range(rng.randrange(0, style.blots + 1)):
        _draw_blot(draw, style, rng)
    ink = rng.randrange(0, 20)
    paper.paste(ink, (0, 0), _make_letter_mask(shown, style, rng))
    if rng.random() < style.strokes:
        ends = [(side, rng.randrange(0, style.height)) for side in (0, style.width - 1)]
        ImageDraw.Draw(paper).line(ends, fill=rng.randrange(0, 90), width=1)
    return np.asarray(paper, dtype=np.uint8)[:, :, None]


def _draw_wrong_letter(letter: str, style: TextImageStyle, rng: Rng) -> str:
    others = style.alphabet.replace(letter, "")
    return others[rng.randrange(0, len(others))]


def _draw_blot(draw: ImageDraw.ImageDraw, style: TextImageStyle, rng: Rng) -> None:
    x, y = rng.randrange(0, style.width), rng.randrange(0, style.height)
    radius = rng.randrange(1, max(2, style.height // 4))
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=rng.randrange(110, 220))


def _make_letter_mask(text: str, style: TextImageStyle, rng: Rng) -> Image.Image:
    """Return a mask of the letters: each in the middle of its own cell, all of one size, as large as fits."""
    cell = (style.width - 2 * style.jitter) // len(text)
    size = _find_font_size(style.alphabet, cell, style.height - 2 * style.jitter)
    _, top, _, bottom = _box(style.alphabet, size)
    across, down = (rng.randrange(-style.jitter, style.jitter + 1) for _ in range(2))
    mask = Image.new("L", (style.width, style.height), 0)
    draw = ImageDraw.Draw(mask)
    for number, letter in enumerate(text):
        left, _, right, _ = _box(letter, size)
        x = number * cell + (style.width - cell * len(text)) // 2 + (cell - (right - left)) // 2 - left + across
        draw.text((x, (style.height - (bottom - top)) // 2 - top + down), letter, fill=255, font=_load_font(size))
    if style.tilt:
        mask = mask.rotate((2 * rng.random() - 1) * style.tilt, Image.Resampling.BILINEAR)
    return mask


@cache
def _load_font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise ConfigError("Pillow was built without FreeType: it has no font of every size", key="pillow")
    return font


@cache
def _find_font_size(alphabet: str, width: int, height: int) -> int:
    """Return the largest font size whose every letter fits into a cell."""
    size = 5
    while size < 2 * height:
        boxes = [_box(letter, size + 1) for letter in alphabet]
        if max(right - left for left, _, right, _ in boxes) > width or _text_height(alphabet, size + 1) > height:
            break
        size += 1
    return size


def _text_height(alphabet: str, size: int) -> float:
    _, top, _, bottom = _box(alphabet, size)
    return bottom - top


@cache
def _box(text: str, size: int) -> tuple[float, float, float, float]:
    return _load_font(size).getbbox(text)
