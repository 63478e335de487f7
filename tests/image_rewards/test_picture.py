"""Every form of a picture holds the same pixels, and nothing oversized or foreign is unpacked."""

from __future__ import annotations

import struct
from io import BytesIO

import numpy as np
import pytest
from PIL import Image as Pillow

from headway.errors import RewardError
from headway.rewards.images import picture
from headway.types import Image
from tests.image_rewards.factory import episode

RGB = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def test_a_picture_is_the_same_in_every_form() -> None:
    image = picture.image_from(RGB)
    assert np.array_equal(picture.pixels_of(image), RGB)
    assert np.array_equal(picture.unwired(*picture.wired(image)), RGB)
    assert picture.image_from_base64(picture.png_base64(image)) == image
    assert np.array_equal(np.array(Pillow.open(BytesIO(picture.png_of(image)))), RGB)


def test_grey_pictures_have_three_equal_channels() -> None:
    grey = RGB[:, :, :1]
    for pixels in (grey, grey[:, :, 0]):
        assert np.array_equal(picture.pixels_of(picture.image_from(pixels)), np.repeat(grey, 3, axis=2))


@pytest.mark.parametrize("pixels", [RGB.astype(np.float32), RGB[None], RGB[:, :, :2], np.zeros((2, 2, 4), np.uint8)])
def test_other_arrays_are_no_pictures(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="a picture is uint8"):
        picture.image_from(pixels)


def test_what_comes_from_outside_is_checked_before_it_is_unpacked() -> None:
    png = bytearray(picture.png_of(picture.image_from(RGB)))
    png[16:24] = struct.pack(">II", 100_000, 100_000)
    with pytest.raises(ValueError, match="at most"):
        picture.image_from_png(bytes(png))
    with pytest.raises(ValueError, match="is no PNG"):
        picture.image_from_png(b"GIF89a" + bytes(30))
    with pytest.raises(ValueError, match="not base64"):
        picture.image_from_base64("?")
    with pytest.raises(ValueError, match="no picture"):
        picture.png_of(Image(height=5, width=7, pixels=b"123"))
    with pytest.raises(ValueError, match="reshape"):
        picture.pixels_of(Image(height=5, width=7, pixels=b"123"))


def test_an_episode_without_a_picture_cannot_be_judged() -> None:
    with pytest.raises(RewardError, match=r"7\.0.*no picture"):
        picture.image_of(episode(None))
