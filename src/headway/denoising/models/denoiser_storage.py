"""Loading and saving of denoising models, and the models that come with Headway (`pretrain: text-images`).

A model is a directory with `config.json` and `model.safetensors`, or a pipeline of `diffusers`.

Guarantees: a `SmallMmdit` is loaded as it was saved, bit for bit. A directory that holds something else is refused with
a `ConfigError` that says what is wrong. Nothing is pickled.
"""

from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headway.denoising.models.denoiser import WEIGHTS_FILE, Denoiser
from headway.denoising.models.mmdit import SmallMmdit, is_small_mmdit, read_mmdit_config
from headway.denoising.models.stable_diffusion_3 import is_sd3, load_sd3
from headway.errors import ConfigError

TEXT_IMAGES = "text-images"
"""Draws four digits in 16 × 32 pixels, often wrong and sometimes cluttered: a base that a reward can improve."""

_CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
"""Folder of the models that come with Headway: each has a `README.md` that tells how it was made."""


def save_small_mmdit(model: SmallMmdit, directory: Path) -> None:
    """Write both files, the configuration last: a directory that has a configuration is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, directory / WEIGHTS_FILE)
    model.save_config(directory)


def load_small_mmdit(directory: Path, *, device: torch.device | str = "cpu") -> SmallMmdit:
    """Load the model of a directory that `save_small_mmdit` made."""
    model = SmallMmdit(read_mmdit_config(directory))
    try:
        model.load_state_dict(load_file(directory / WEIGHTS_FILE))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"its weights cannot be used: {error}", key="pretrain", value=str(directory)) from error
    return model.to(device)


def open_denoiser(
    directory: Path, *, height: int | None = None, width: int | None = None, dtype: torch.dtype = torch.float32
) -> Denoiser:
    """Load a small MMDiT, a Stable Diffusion 3 pipeline, or a checkpoint of either.

    `height` and `width` in pixels are for models that can draw several sizes; a model of one size refuses any other.
    `dtype` also applies to the frozen parts of a pipeline: its text encoders and its VAE.
    """
    if is_small_mmdit(directory):
        model = load_small_mmdit(directory).to(dtype)
        size = model.config.height, model.config.width
        if (height or size[0], width or size[1]) != size:
            raise ConfigError(f"the model draws {size[0]} × {size[1]}", key="height, width", value=(height, width))
        return model
    if is_sd3(directory):
        return load_sd3(directory, height=height, width=width, dtype=dtype)
    raise ConfigError(
        "holds no denoising model",
        key="pretrain",
        value=str(directory),
        hint="a small MMDiT (config.json, model.safetensors) or a StableDiffusion3Pipeline (model_index.json)",
    )


def list_shipped_models() -> tuple[str, ...]:
    """Return the names that `find_shipped_model` knows."""
    return tuple(sorted(path.parent.name for path in _CHECKPOINTS.glob("*/config.json")))


def find_shipped_model(name: str) -> Path:
    """Return the directory of a model. Raises `ConfigError` for an unknown name."""
    names = list_shipped_models()
    if name not in names:
        close = get_close_matches(name, names, 1)
        meant = f", did you mean {close[0]!r}?" if close else ""
        hint = f"one of {', '.join(names)}, or a directory"
        raise ConfigError(f"is no model that comes with Headway{meant}", key="pretrain", value=name, hint=hint)
    return _CHECKPOINTS / name
