"""Every form of a picture holds the same pixels, and nothing oversized or foreign is unpacked."""

from __future__ import annotations

import struct
from io import BytesIO

import numpy as np
import pytest
from PIL import Image as Pillow

from headway.errors import RewardError
from headway.rewards.images import image_reward
from headway.types import Image
from tests.image_rewards.factory import episode

RGB = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def test_a_picture_is_the_same_in_every_form() -> None:
    image = image_reward.array_to_image(RGB)
    assert np.array_equal(image_reward.image_to_array(image), RGB)
    assert np.array_equal(image_reward.json_to_array(*image_reward.image_to_json(image)), RGB)
    assert image_reward.png_base64_to_image(image_reward.image_to_png_base64(image)) == image
    assert np.array_equal(np.array(Pillow.open(BytesIO(image_reward.encode_png(image)))), RGB)


def test_grey_pictures_have_three_equal_channels() -> None:
    grey = RGB[:, :, :1]
    for pixels in (grey, grey[:, :, 0]):
        assert np.array_equal(
            image_reward.image_to_array(image_reward.array_to_image(pixels)), np.repeat(grey, 3, axis=2)
        )


@pytest.mark.parametrize("pixels", [RGB.astype(np.float32), RGB[None], RGB[:, :, :2], np.zeros((2, 2, 4), np.uint8)])
def test_other_arrays_are_no_pictures(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="a picture is uint8"):
        image_reward.array_to_image(pixels)


def test_what_comes_from_outside_is_checked_before_it_is_unpacked() -> None:
    png = bytearray(image_reward.encode_png(image_reward.array_to_image(RGB)))
    png[16:24] = struct.pack(">II", 100_000, 100_000)
    with pytest.raises(ValueError, match="at most"):
        image_reward.decode_png(bytes(png))
    with pytest.raises(ValueError, match="is no PNG"):
        image_reward.decode_png(b"GIF89a" + bytes(30))
    with pytest.raises(ValueError, match="not base64"):
        image_reward.png_base64_to_image("?")
    with pytest.raises(ValueError, match="no picture"):
        image_reward.encode_png(Image(height=5, width=7, pixels=b"123"))
    with pytest.raises(ValueError, match="reshape"):
        image_reward.image_to_array(Image(height=5, width=7, pixels=b"123"))


def test_an_episode_without_a_picture_cannot_be_judged() -> None:
    with pytest.raises(RewardError, match=r"7\.0.*no picture"):
        image_reward.get_episode_image(episode(None))
