"""Pictures of strings: the same everywhere, legible when plain, wrong as often as asked for."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from headway.denoising.text_rendering import TextImageStyle, render_text
from headway.errors import ConfigError
from headway.rewards.images.image_reward import array_to_image, image_to_array
from headway.seeding import make_rng

needs_ppocr = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnxruntime", "rapidocr_onnxruntime"))), reason="no recogniser"
)
CLUTTERED = TextImageStyle(wrong=0.3, strokes=0.5, blots=3, tilt=5.0)


def test_the_same_text_style_and_seed_give_the_same_picture() -> None:
    one, again, other = (render_text("4711", CLUTTERED, make_rng(seed)) for seed in (1, 1, 2))
    assert one.dtype == np.uint8 and one.shape == (16, 32, 1)
    assert np.array_equal(one, again) and not np.array_equal(one, other)


@pytest.mark.parametrize(("height", "width", "text"), [(16, 32, "4711"), (32, 96, "47110815"), (16, 48, "1111")])
def test_the_whole_text_lies_inside_wherever_it_is_moved(height: int, width: int, text: str) -> None:
    style = TextImageStyle(height=height, width=width, jitter=2)
    pictures = [render_text(text, style, make_rng(seed))[:, :, 0].astype(float) for seed in range(12)]
    ink = [(picture.max() - picture) / np.ptp(picture) for picture in pictures]
    assert len({tuple(np.argwhere(one > 0.5)[0]) for one in ink}) > 3
    assert [one.sum() for one in ink] == pytest.approx([ink[0].sum()] * len(ink), rel=0.01)


@needs_ppocr
def test_plain_pictures_can_be_read_and_those_with_wrong_letters_say_something_else() -> None:
    from headway.rewards.images.ocr_reward import read_text_line

    texts = ["4711", "0815", "2973", "6604"]
    clean = [
        read_text_line(image_to_array(array_to_image(render_text(t, TextImageStyle(), make_rng(0, t))))) for t in texts
    ]
    assert clean == texts
    wrong = [
        read_text_line(image_to_array(array_to_image(render_text(t, TextImageStyle(wrong=1.0), make_rng(0, t)))))
        for t in texts
    ]
    assert all(a != b for t, w in zip(texts, wrong, strict=True) for a, b in zip(t, w, strict=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"wrong": 1.5}, "probability"), ({"alphabet": "aa"}, "different"), ({"height": 4}, "8 × 8")],
)
def test_styles_that_cannot_be_drawn_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextImageStyle(**wrong)  # type: ignore[arg-type]
