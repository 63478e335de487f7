"""The OCR reward reads real pictures in real worker processes; whatever goes wrong there is no verdict."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil

import pytest

from headway.errors import ConfigError, RewardError
from headway.rewards.images.ocr_reward import make_ocr_reward
from headway.types import Image
from tests.image_rewards.factory import episode, scored, written

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


@needs_tesseract
def test_a_second_reader_agrees() -> None:
    reward = make_ocr_reward(reader="tesseract", alphabet="0123456789")
    assert scored(reward, written("4711"), answer="4711").value == 1.0
    assert scored(reward, written("4711"), answer="0836").value == 0.0


def test_what_cannot_work_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="one of ppocr, tesseract"):
        make_ocr_reward(reader="abbyy")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="apt install tesseract-ocr"):
        make_ocr_reward(reader="tesseract")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs onnxruntime, rapidocr_onnxruntime"):
        make_ocr_reward()
