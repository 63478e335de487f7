"""The OCR reward reads real pictures in real worker processes; whatever goes wrong there is no verdict."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil

import numpy as np
import pytest

from headway.errors import ConfigError, RewardError
from headway.rewards.images.image_reward import image_to_array
from headway.rewards.images.ocr_reward import make_ocr_reward, measure_agreement, read_text_line, read_text_page
from headway.rewards.images.text_detection import TextBox, find_connected_boxes, sort_in_reading_order
from headway.types import Image
from tests.image_rewards.factory import episode, photographed, scored, written

needs_ppocr = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnxruntime", "rapidocr_onnxruntime"))), reason="no recogniser"
)
needs_tesseract = pytest.mark.skipif(shutil.which("tesseract") is None, reason="no tesseract")


@needs_ppocr
def test_pictures_are_read_side_by_side() -> None:
    reward = make_ocr_reward(concurrency=2)
    cases = [("4711", "4711", 1.0), ("4711", "4712", 0.75), ("0836", "0836", 1.0), ("4711", "0836", 0.0)]

    async def scene() -> list[dict[str, float]]:
        scores = await asyncio.gather(*(reward.score(episode(written(t), answer=a)) for t, a, _ in cases))
        return [{"value": score.value, **score.parts} for score in scores]

    assert asyncio.run(scene()) == [{"value": value, "exact": float(value == 1)} for *_, value in cases]


@needs_ppocr
def test_an_empty_picture_is_a_reward_of_zero_and_a_broken_one_is_none() -> None:
    reward = make_ocr_reward(concurrency=1)
    assert scored(reward, Image(height=16, width=32, pixels=bytes([255]) * 16 * 32 * 3), answer="47").value == 0.0
    with pytest.raises(RewardError, match="reshape"):
        scored(reward, Image(height=16, width=32, pixels=b"123"), answer="47")
    with pytest.raises(RewardError, match="no picture"):
        scored(reward, None, answer="47")
    with pytest.raises(RewardError, match="no 'answer'"):
        scored(reward, written("47"))
    with pytest.raises(RewardError, match="no letters"):
        scored(reward, written("47"), answer=" ")


@needs_ppocr
def test_a_reading_that_takes_too_long_has_no_verdict_and_the_next_one_has() -> None:
    wide = Image(height=16, width=16_000, pixels=bytes(16 * 16_000 * 3))
    with pytest.raises(RewardError, match=r"no verdict after 0\.001 s"):
        scored(make_ocr_reward(concurrency=1, timeout_s=0.001), wide, answer="47")
    assert scored(make_ocr_reward(concurrency=1), written("4711"), answer="4711").value == 1.0


SIGNS = [
    (["GRAND OPENING"], 512, 40),
    (["Welcome to", "Headway Station", "Platform 9"], 512, 36),
    (["Fresh Coffee", "Open daily", "from 7 to 19"], 1024, 48),
]


@needs_ppocr
@pytest.mark.parametrize(("lines", "side", "size"), SIGNS, ids=lambda value: str(value))
def test_text_is_found_in_ordinary_pictures(lines: list[str], side: int, size: int) -> None:
    image, target = photographed(lines, side=side, size=size), " ".join(lines)
    pixels = image_to_array(image)
    assert "".join(read_text_page(pixels).split()) == "".join(target.split()), "all lines, in order, and nothing else"
    assert measure_agreement(target, read_text_line(pixels)) < 0.3, "a whole picture is no line"


@needs_ppocr
def test_the_reward_looks_for_lines_where_a_picture_is_no_line() -> None:
    image = photographed(["Headway", "Station"], side=512, size=40)
    assert scored(make_ocr_reward(concurrency=1), image, answer="Headway Station").value == 1.0
    assert scored(make_ocr_reward(concurrency=1, layout="line"), image, answer="Headway Station").value < 0.5
    assert 0.5 < scored(make_ocr_reward(concurrency=1), image, answer="Headway Platform").value < 1.0


@needs_ppocr
def test_pictures_without_text_and_lines_that_stand_upright_are_read_too() -> None:
    empty = image_to_array(photographed([], side=512, size=40))
    assert read_text_page(empty) == ""
    sign = image_to_array(photographed(["PLATFORM"], side=512, size=48))
    for turns in (1, 3):
        assert read_text_page(np.rot90(sign, turns)) == "PLATFORM"


@needs_tesseract
@pytest.mark.parametrize(("lines", "side", "size"), SIGNS, ids=lambda value: str(value))
def test_tesseract_finds_most_of_the_text_in_ordinary_pictures(lines: list[str], side: int, size: int) -> None:
    reward = make_ocr_reward(reader="tesseract", timeout_s=60.0)
    assert scored(reward, photographed(lines, side=side, size=size), answer=" ".join(lines)).value > 0.6
    plain = written("\n".join(lines), height=side, width=side, size=size)
    assert scored(reward, plain, answer=" ".join(lines)).value == 1.0


def test_pixels_that_touch_are_one_line_and_lines_come_in_reading_order() -> None:
    mask = np.array([[1, 1, 0, 0, 1], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 1, 0, 1]], dtype=bool)
    boxes = {(0, 2, 0, 3), (0, 2, 4, 5), (3, 5, 0, 3), (4, 5, 4, 5)}
    assert set(find_connected_boxes(mask)) == boxes and find_connected_boxes(np.zeros((3, 3), dtype=bool)) == []
    first, second, below = TextBox(0, 10, 0, 40), TextBox(3, 14, 50, 90), TextBox(20, 30, 10, 60)
    assert sort_in_reading_order([below, second, first]) == [first, second, below]


@needs_tesseract
def test_a_second_reader_agrees() -> None:
    reward = make_ocr_reward(reader="tesseract", alphabet="0123456789")
    assert scored(reward, written("4711"), answer="4711").value == 1.0
    assert scored(reward, written("4711"), answer="0836").value == 0.0


def test_what_cannot_work_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="one of ppocr, tesseract"):
        make_ocr_reward(reader="abbyy")
    with pytest.raises(ConfigError, match=r"layout = 'column'.*one of auto, line, page"):
        make_ocr_reward(layout="column")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="apt install tesseract-ocr"):
        make_ocr_reward(reader="tesseract")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs onnxruntime, rapidocr_onnxruntime"):
        make_ocr_reward()
