"""The flow model behind the trainer: stored latents in, laws of the steps that were taken from them out.

Guarantees: the same noise levels, sampler and guidance as in the engine; conditioning is made without gradient.
What it shows to the world are detached tensors by the names that the model has without adapters, LoRA merged.

Legend: N steps of a micro-batch, C channels, H and W of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headway.algorithms.denoising import LatentTransition, apply_guidance
from headway.denoising import adapters
from headway.denoising.models.denoiser import Conditioning
from headway.denoising.settings import DenoisingSettings
from headway.errors import ConfigError
from headway.trainers.local.lora import drop_tied_duplicates, merge_adapters
from headway.trainers.local.settings import LocalSettings

_MOST_PROMPTS = 64


class DenoisingPolicy:
    """A `Denoiser` that is trained. `causal` is what a checkpoint asks for the model's description."""

    def __init__(self, model: Any, settings: LocalSettings, flow: DenoisingSettings) -> None:
        dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        self.model = model.to(device=settings.device, dtype=dtype).train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if settings.gradient_checkpointing and hasattr(self.model, "enable_gradient_checkpointing"):
            self.model.enable_gradient_checkpointing()  # models that are large enough to want it
        self.adapted = settings.lora is not None
        if settings.lora is not None:
            adapters.attach(self.model, settings.lora)
        self.causal = adapters.Described(self.model)
        self._device, self._half = settings.device, settings.precision == "bf16"
        self._flow, self._sampler = flow, flow.make_sampler()
        self.grid = lru_cache(maxsize=8)(lambda steps: flow.grid_of(model, steps))
        self._encoded = lru_cache(maxsize=_MOST_PROMPTS)(self._encode)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a latent."""
        found: tuple[int, int, int] = self.model.latent_shape
        return found

    def trainable(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves, by name."""
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """All weights, each tensor once; live ones, or merged copies with LoRA."""
        return merge_adapters(self.model) if self.adapted else drop_tied_duplicates(self.model.state_dict())

    def levels(self, steps: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Noise levels before and behind the step at each place of a path of so many steps, [N]."""
        pairs = [(float(self.grid(n)[at]), float(self.grid(n)[at + 1])) for n, at in zip(steps, places, strict=True)]
        s_N2 = torch.tensor(pairs, device=self._device)
        return s_N2[:, 0], s_N2[:, 1]

    def velocity(
        self, x_NCHW: Tensor, s_N: Tensor, prompts: Sequence[str], values: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """With the guidance of training, and under `values` in the place of the weights of the same names."""
        v_NCHW = self._called(x_NCHW, s_N, prompts, values)
        if self._flow.guidance == 1.0:
            return v_NCHW
        return apply_guidance(v_NCHW, self._called(x_NCHW, s_N, [""] * len(prompts), values), self._flow.guidance)

    def law(
        self,
        x_NCHW: Tensor,
        s_N: Tensor,
        next_N: Tensor,
        prompts: Sequence[str],
        values: Mapping[str, Tensor] | None = None,
    ) -> LatentTransition:
        """Of the step from `x_NCHW` on, with gradients where they are on."""
        return self._sampler.step(x_NCHW, self.velocity(x_NCHW, s_N, prompts, values), s_N, next_N)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model is what it was at the start."""
        if not self.adapted:
            raise ConfigError("only LoRA can be switched off", key="lora", value=None)
        adapters.switch(self.model, on=False)
        try:
            yield
        finally:
            adapters.switch(self.model, on=True)

    def _called(
        self, x_NCHW: Tensor, s_N: Tensor, prompts: Sequence[str], values: Mapping[str, Tensor] | None
    ) -> Tensor:
        conditioning = Conditioning.joined([self._encoded(prompt) for prompt in prompts])
        with self._cast():
            if values is None:
                found: Tensor = self.model(x_NCHW, s_N, conditioning)
            else:
                found = functional_call(self.model, dict(values), (x_NCHW, s_N, conditioning))
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def _encode(self, prompt: str) -> Conditioning:
        with torch.no_grad():
            found: Conditioning = self.model.encode([prompt])
        return found.to(self._device)

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.split(":")[0], torch.bfloat16) if self._half else nullcontext()
