"""The model that comes with Headway: it loads, draws, and is imperfect in the way its page says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from headway.config import load_config as load_config  # noqa: E402
from headway.data.generated_tasks import StringSet  # noqa: E402
from headway.denoising.image_evaluation import draw_images  # noqa: E402
from headway.denoising.models.denoiser_storage import (  # noqa: E402
    TEXT_IMAGES,
    find_shipped_model,
    list_shipped_models,
    load_small_mmdit,
)
from headway.denoising.models.mmdit import count_parameters  # noqa: E402
from headway.denoising.pretraining import BASE_PRETRAINING  # noqa: E402
from headway.errors import ConfigError  # noqa: E402
from headway.rewards.images.image_reward import image_to_array  # noqa: E402
from headway.rewards.images.ocr_reward import measure_agreement  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_it_has_the_shape_that_it_is_made_with_and_is_small() -> None:
    directory = find_shipped_model(TEXT_IMAGES)
    assert (
        load_small_mmdit(directory).config == BASE_PRETRAINING.model
        and count_parameters(load_small_mmdit(directory)) < 500_000
    )
    assert sum(file.stat().st_size for file in directory.iterdir()) < 1_000_000
    assert "headway pretrain" in (directory / "README.md").read_text(encoding="utf-8")


def test_names_that_mean_nothing_are_refused() -> None:
    assert TEXT_IMAGES in list_shipped_models()
    with pytest.raises(ConfigError, match="did you mean 'text-images'"):
        find_shipped_model("text-image")


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnxruntime", "rapidocr_onnxruntime"))), reason="no recogniser"
)
def test_it_is_legible_and_often_wrong() -> None:
    from headway.rewards.images.ocr_reward import read_text_line

    strings = StringSet().list_held_out(40, seed=7)
    found = [
        read_text_line(image_to_array(image))
        for image in draw_images(load_small_mmdit(find_shipped_model(TEXT_IMAGES)), strings)
    ]
    reward = sum(map(measure_agreement, strings, found)) / len(strings)
    assert 0.4 < reward < 0.75
    assert sum(len(text) == 4 for text in found) > 30


def test_the_example_starts_from_it_and_is_judged_by_ocr() -> None:
    config = load_config(ROOT / "examples" / "images.yaml").config
    assert config.pretrain == TEXT_IMAGES and config.denoising is not None
    assert [reward.reward_fn for reward in config.rewards.values()] == ["ocr"]
    assert config.actor_train.data_args.file_name == ("strings",)
