"""Compressibility, functions of the user's own that look at pictures, and sums of several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headway.config import RewardConfig
from headway.errors import ConfigError, RewardError
from headway.rewards.images.image_reward import array_to_image, make_compressibility_reward
from headway.rewards.reward_registry import make_reward, make_rewards
from tests.image_rewards.factory import scored, written

NOISE = array_to_image(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
FLAT = array_to_image(np.full((32, 32, 3), 128, dtype=np.uint8))


def test_smooth_pictures_get_smaller_than_noise() -> None:
    reward = make_compressibility_reward()
    assert scored(reward, NOISE).value < scored(reward, FLAT).value < 0
    assert scored(make_compressibility_reward(quality=10), NOISE).value > scored(reward, NOISE).value
    with pytest.raises(ConfigError, match="1 to 100"):
        make_compressibility_reward(quality=0)


def test_a_function_whose_first_parameter_is_image_sees_the_pixels(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def brightness(image, task_data, scale=1.0):\n"
        "    assert image.shape == (16, 32, 3) and image.dtype.name == 'uint8'\n"
        "    return {'score': scale * float(image.mean()) / 255, 'wanted': task_data['answer']}\n"
    )
    reward = make_reward(f"{file}:brightness", {"scale": 2.0})
    found = scored(reward, written(""), answer=3)
    assert found.value == pytest.approx(2 * 240 / 255) and found.parts == {"wanted": 3.0}
    with pytest.raises(RewardError, match="no picture"):
        scored(reward, None)


def test_rewards_of_pictures_add_up_with_weights(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def bright(image, task_data):\n    return image.mean() / 240\n")
    rewards = {
        "bright": RewardConfig(reward_fn=f"{file}:bright", tag_included=("default",)),
        "small": RewardConfig(reward_fn="compressibility", weight=0.5, tag_included=("default",)),
    }
    found = scored(make_rewards(rewards), written(""))
    alone = scored(make_compressibility_reward(), written(""))
    assert found.parts == {"bright": pytest.approx(1.0), "small": pytest.approx(0.5 * alone.value)}
    assert found.value == pytest.approx(1.0 + 0.5 * alone.value)
