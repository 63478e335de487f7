"""Denoising models behind one protocol: a small multimodal transformer, and Stable Diffusion 3 of `diffusers`.

The package needs torch; only back ends import it.
"""

from headway.denoising.models.denoiser import Conditioning, Denoiser
from headway.denoising.models.denoiser_storage import load_small_mmdit, open_denoiser, save_small_mmdit
from headway.denoising.models.mmdit import MmditConfig, SmallMmdit, count_parameters, is_small_mmdit
from headway.denoising.models.stable_diffusion_3 import StableDiffusion3, is_sd3, load_sd3

__all__ = [
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
