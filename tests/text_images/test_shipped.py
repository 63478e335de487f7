"""The model that comes with Headway: it loads, draws, and is imperfect in the way its page says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from headway.config import load as load_config  # noqa: E402
from headway.data.strings import Strings  # noqa: E402
from headway.errors import ConfigError  # noqa: E402
from headway.generative.models import load, parameters_of  # noqa: E402
from headway.generative.pretrained import TEXT_IMAGES, shipped, shipped_names  # noqa: E402
from headway.generative.pretraining import BASE  # noqa: E402
from headway.generative.text_images.evaluation import draw  # noqa: E402
from headway.rewards.images.picture import pixels_of  # noqa: E402
from headway.rewards.images.reading import agreement  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_it_has_the_shape_that_it_is_made_with_and_is_small() -> None:
    directory = shipped(TEXT_IMAGES)
    assert load(directory).config == BASE.model and parameters_of(load(directory)) < 500_000
    assert sum(file.stat().st_size for file in directory.iterdir()) < 1_000_000
    assert "headway pretrain" in (directory / "README.md").read_text(encoding="utf-8")


def test_names_that_mean_nothing_are_refused() -> None:
    assert TEXT_IMAGES in shipped_names()
    with pytest.raises(ConfigError, match="did you mean 'text-images'"):
        shipped("text-image")


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnxruntime", "rapidocr_onnxruntime"))), reason="no recogniser"
)
def test_it_is_legible_and_often_wrong() -> None:
    from headway.rewards.images.recogniser import read

    strings = Strings().held_out(40, seed=7)
    found = [read(pixels_of(image)) for image in draw(load(shipped(TEXT_IMAGES)), strings)]
    reward = sum(map(agreement, strings, found)) / len(strings)
    assert 0.4 < reward < 0.75
    assert sum(len(text) == 4 for text in found) > 30


def test_the_example_starts_from_it_and_is_judged_by_ocr() -> None:
    config = load_config(ROOT / "examples" / "images.yaml").config
    assert config.pretrain == TEXT_IMAGES and config.flow is not None
    assert [reward.reward_fn for reward in config.rewards.values()] == ["ocr"]
    assert config.actor_train.data_args.file_name == ("strings",)
