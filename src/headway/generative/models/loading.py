"""A directory becomes the flow model that it holds, whichever kind that is."""

from __future__ import annotations

from pathlib import Path

import torch

from headway.errors import ConfigError
from headway.generative.models.denoiser import Denoiser
from headway.generative.models.sd3 import is_sd3, load_sd3
from headway.generative.models.storage import is_small_mmdit, load


def open_denoiser(
    directory: Path, *, height: int | None = None, width: int | None = None, dtype: torch.dtype = torch.float32
) -> Denoiser:
    """A small MMDiT, a Stable Diffusion 3 pipeline, or a checkpoint of either.

    `height` and `width` in pixels are for models that can draw several sizes; one that cannot refuses another than its
    own. `dtype` is that of what a pipeline does not train too: its text encoders and its VAE.
    """
    if is_small_mmdit(directory):
        model = load(directory).to(dtype)
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
