"""The protocol of a denoising model: it encodes prompts, predicts velocities and decodes latents into pictures.

A `Denoiser` is a `torch.nn.Module`. Its parameters are trained and sent to engines; the text encoders and the VAE of a
pipeline are frozen and do not count among them.

Guarantees that engines rely on: a sample's velocity depends on its own row of the batch alone. Conditioning of any
prompts can be concatenated and cut along the batch, since it has the same shape but for the first dimension.

Legend: B samples, C channels, H and W of the latent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
"""The two files of a checkpoint; `model_type` in the first tells which model it is."""


def read_checkpoint_config(directory: Path) -> dict[str, Any]:
    """Return the content of `config.json`, or an empty dict if there is no such file."""
    try:
        content = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """Named tensors with one row per prompt: what `encode` made of the texts, and all that `forward` sees of them."""

    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def to(self, device: torch.device | str) -> Conditioning:
        """Return the same rows on `device`."""
        return Conditioning({name: rows.to(device) for name, rows in self.tensors.items()})

    @staticmethod
    def concatenate(parts: Sequence[Conditioning]) -> Conditioning:
        """Return one batch made of several."""
        return Conditioning({name: torch.cat([part[name] for part in parts]) for name in parts[0].tensors})


class Denoiser(Protocol):
    """A denoising model with its text encoder and decoder."""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """[C, H, W] of one latent."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Encode prompts without gradient; the empty prompt is the unconditional one of guidance."""

    def __call__(self, x: Tensor, s: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the velocity e − x₀ at x [B, C, H, W] and noise levels s [B], in the precision of the model."""

    def decode(self, x: Tensor) -> Tensor:
        """Decode clean latents into pictures in [0, 1], [B, 3, height, width], without gradient."""

    def make_timesteps(self, steps: int) -> Tensor:
        """Return the noise levels that the model was trained for, [steps + 1], from 1 to 0."""

    def enable_gradient_checkpointing(self) -> None:
        """Save memory in training by computing activations again; a model too small to need it does nothing."""

    def save_config(self, directory: Path) -> None:
        """Write the file that makes a directory of weights a checkpoint that `open_denoiser` loads."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the trained network; parameters without `requires_grad` stay as they are."""

    def state_dict(self) -> dict[str, Any]: ...
