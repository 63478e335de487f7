"""Models as directories: what comes back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headway.denoising.models.denoiser_storage import load_small_mmdit, open_denoiser, save_small_mmdit
from headway.denoising.models.mmdit import SmallMmdit, is_small_mmdit
from headway.errors import ConfigError
from tests.denoising_models.factory import SMALL, small


def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = small(seed=5)
    save_small_mmdit(model, tmp_path / "model")
    again = load_small_mmdit(tmp_path / "model")
    assert again.config == SMALL and is_small_mmdit(tmp_path / "model")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_a_directory_opens_as_what_it_holds(tmp_path: Path) -> None:
    save_small_mmdit(small(), tmp_path)
    assert isinstance(open_denoiser(tmp_path), SmallMmdit)
    assert open_denoiser(tmp_path, height=8, width=16).latent_shape == (1, 8, 16)
    with pytest.raises(ConfigError, match="the model draws 8 × 16"):
        open_denoiser(tmp_path, height=32)
    with pytest.raises(ConfigError, match="holds no denoising model"):
        open_denoiser(tmp_path / "nothing")


def test_what_is_no_such_model_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory of a small MMDiT"):
        load_small_mmdit(tmp_path)
    save_small_mmdit(small(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "flavour": 1}))
    with pytest.raises(ConfigError, match="another version"):
        load_small_mmdit(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**described, "dim": 32}))
    with pytest.raises(ConfigError, match="its weights cannot be used"):
        load_small_mmdit(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**described, "model_type": "llama"}))
    assert not is_small_mmdit(tmp_path)
