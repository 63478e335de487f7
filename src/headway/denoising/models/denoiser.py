"""What engines and trainers know of a flow model: it turns prompts into conditioning, says velocities, makes pictures.

A `Denoiser` is a `torch.nn.Module`: its parameters are what is trained and sent to engines; text encoders and VAE of an
adapter are frozen and are not among them.

Guarantees that engines rely on: a sample's velocity depends on its own row of the batch alone; conditioning of any
prompts can be joined and cut along the batch, since all of it has the same shape but for the first dimension.

Legend: B samples, C channels, H and W of the latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """Named tensors, one row per prompt: what `encode` made of the texts, and all that `forward` sees of them."""

    tensors: Mapping[str, Tensor]

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def select(self, index: Tensor) -> Conditioning:
        """The rows at `index`, in that order; a row may come several times."""
        return Conditioning({name: rows[index.to(rows.device)] for name, rows in self.tensors.items()})

    def repeat(self, times: int) -> Conditioning:
        """Each row `times` times, one after the other."""
        return Conditioning({name: rows.repeat_interleave(times, 0) for name, rows in self.tensors.items()})

    def to(self, device: torch.device | str) -> Conditioning:
        return Conditioning({name: rows.to(device) for name, rows in self.tensors.items()})

    @staticmethod
    def joined(parts: Sequence[Conditioning]) -> Conditioning:
        """One batch of several."""
        return Conditioning({name: torch.cat([part[name] for part in parts]) for name in parts[0].tensors})


class Denoiser(Protocol):
    """A flow model with everything around it."""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """[C, H, W] of one latent."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Without gradient; the empty prompt is the unconditional one of guidance."""

    def __call__(self, x: Tensor, s: Tensor, conditioning: Conditioning) -> Tensor:
        """The velocity e − x₀ at x [B, C, H, W], each sample at its own noise level s [B]; in the model's precision."""

    def decode(self, x: Tensor) -> Tensor:
        """Pictures in [0, 1], [B, 3, height, width], of clean latents; without gradient."""

    def grid(self, steps: int) -> Tensor:
        """The noise levels that it is used to, [steps + 1], from 1 to 0."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the network that is trained; those without `requires_grad` stay as they are."""

    def state_dict(self) -> dict[str, Any]: ...
