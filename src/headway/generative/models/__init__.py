"""Flow models behind one protocol: a small multimodal transformer of our own, and Stable Diffusion 3 of `diffusers`.

Needs torch; imported by back ends only.
"""

from headway.generative.models.denoiser import Conditioning, Denoiser
from headway.generative.models.loading import open_denoiser
from headway.generative.models.mmdit import SmallMmdit, parameters_of
from headway.generative.models.sd3 import LORA_TARGETS as LORA_TARGETS
from headway.generative.models.sd3 import StableDiffusion3, is_sd3, load_sd3
from headway.generative.models.shape import ALPHABET, MmditConfig
from headway.generative.models.storage import is_small_mmdit, load, save

__all__ = [
    "ALPHABET",
    "Conditioning",
    "Denoiser",
    "MmditConfig",
    "SmallMmdit",
    "StableDiffusion3",
    "is_sd3",
    "is_small_mmdit",
    "load",
    "load_sd3",
    "open_denoiser",
    "parameters_of",
    "save",
]
