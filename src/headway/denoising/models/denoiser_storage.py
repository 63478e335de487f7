"""A `SmallMmdit` as a directory: `config.json` beside `model.safetensors`.

Guarantees: what was saved is what is loaded, bit for bit; a directory that is something else is refused with a
`ConfigError` that says what is wrong. No pickle.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headway.denoising.models.denoiser import Denoiser
from headway.denoising.models.mmdit import SmallMmdit
from headway.denoising.models.mmdit_config import MmditConfig
from headway.denoising.models.stable_diffusion_3 import is_sd3, load_sd3
from headway.errors import ConfigError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SMALL_MMDIT_TYPE = "headway-small-mmdit"
"""`model_type` in `config.json`: how a directory is told from a language model's."""


def save_small_mmdit(model: SmallMmdit, directory: Path) -> None:
    """Write both files, the configuration last: a directory that has it is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, directory / WEIGHTS)
    shape = {"model_type": SMALL_MMDIT_TYPE, **asdict(model.config)}
    (directory / CONFIG).write_text(json.dumps(shape, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_small_mmdit(directory: Path, *, device: torch.device | str = "cpu") -> SmallMmdit:
    """The model of a directory that `save_small_mmdit` made."""
    model = SmallMmdit(read_mmdit_config(directory))
    try:
        model.load_state_dict(load_file(directory / WEIGHTS))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"its weights cannot be used: {error}", key="pretrain", value=str(directory)) from error
    return model.to(device)


def is_small_mmdit(directory: Path) -> bool:
    """Whether `load_small_mmdit` would take it."""
    try:
        return bool(json.loads((directory / CONFIG).read_text(encoding="utf-8")).get("model_type") == SMALL_MMDIT_TYPE)
    except (OSError, ValueError, AttributeError):
        return False


def read_mmdit_config(directory: Path) -> MmditConfig:
    """The shape of a saved model."""
    if not is_small_mmdit(directory):
        raise ConfigError(
            f"is no directory of a small MMDiT ({CONFIG} with model_type {SMALL_MMDIT_TYPE})",
            key="pretrain",
            value=str(directory),
        )
    shape = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    try:
        return MmditConfig(**{name: value for name, value in shape.items() if name != "model_type"})
    except TypeError as error:
        raise ConfigError(
            f"{CONFIG} was written for another version: {error}", key="pretrain", value=str(directory)
        ) from error


def open_denoiser(
    directory: Path, *, height: int | None = None, width: int | None = None, dtype: torch.dtype = torch.float32
) -> Denoiser:
    """A small MMDiT, a Stable Diffusion 3 pipeline, or a checkpoint of either.

    `height` and `width` in pixels are for models that can draw several sizes; one that cannot refuses another than its
    own. `dtype` is that of what a pipeline does not train too: its text encoders and its VAE.
    """
    if is_small_mmdit(directory):
        model = load_small_mmdit(directory).to(dtype)
        own = model.config.height, model.config.width
        if (height or own[0], width or own[1]) != own:
            raise ConfigError(f"the model draws {own[0]} × {own[1]}", key="height, width", value=(height, width))
        return model
    if is_sd3(directory):
        return load_sd3(directory, height=height, width=width, dtype=dtype)
    raise ConfigError(
        "holds no flow model",
        key="pretrain",
        value=str(directory),
        hint="a small MMDiT (config.json, model.safetensors) or a StableDiffusion3Pipeline (model_index.json)",
    )
