"""Flow models behind one protocol: a small multimodal transformer of our own, and Stable Diffusion 3 of `diffusers`.

Needs torch; imported by back ends only.
"""

from headway.denoising.models.denoiser import Conditioning, Denoiser
from headway.denoising.models.denoiser_storage import (
    is_small_mmdit,
    load_small_mmdit,
    open_denoiser,
    save_small_mmdit,
)
from headway.denoising.models.mmdit import SmallMmdit, count_parameters
from headway.denoising.models.mmdit_config import DEFAULT_ALPHABET, MmditConfig
from headway.denoising.models.stable_diffusion_3 import SD3_LORA_TARGETS as SD3_LORA_TARGETS
from headway.denoising.models.stable_diffusion_3 import StableDiffusion3, is_sd3, load_sd3

__all__ = [
    "DEFAULT_ALPHABET",
    "Conditioning",
    "Denoiser",
    "MmditConfig",
    "SmallMmdit",
    "StableDiffusion3",
    "count_parameters",
    "is_sd3",
    "is_small_mmdit",
    "load_sd3",
    "load_small_mmdit",
    "open_denoiser",
    "save_small_mmdit",
]
