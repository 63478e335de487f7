"""The model that a denoising trainer trains: stored latents in, distributions of the steps taken from them out.

Guarantees: noise levels, sampler and guidance are those of the engine; prompts are encoded without gradient. `weights`
gives detached tensors by the names that the model has without adapters, with LoRA merged. With LoRA only the adapters
train, and they start as the identity.

Legend: N steps of a micro-batch, C channels, H and W of a latent.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headway.algorithms.denoising import LatentTransition, apply_guidance
from headway.denoising.models.denoiser import Conditioning
from headway.denoising.settings import DenoisingSettings
from headway.errors import ConfigError
from headway.extras import import_optional
from headway.trainers.local.local_optimizer import copy_tensors
from headway.trainers.local.lora import drop_tied_duplicates, merge_adapters
from headway.trainers.local.settings import LocalSettings, LoraSettings

_MAX_CACHED_PROMPTS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenPolicy:
    """A copy of the policy that the optimizer does not move."""

    values: Mapping[str, Tensor]
    """Its tensors by the names of the trained parameters; with ranks, the shards of this one."""
    module: nn.Module | None = None
    """The model that computes with them; `None`: the policy's own, with the values put in its place."""


class DenoisingPolicy:
    """A `Denoiser` that is trained."""

    def __init__(self, model: Any, settings: LocalSettings, denoising: DenoisingSettings) -> None:
        dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        self.model = model.to(device=settings.device, dtype=dtype).train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if settings.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        self.has_adapters = settings.lora is not None
        if settings.lora is not None:
            _attach_adapters(self.model, settings.lora)
        self._device, self._half = settings.device, settings.precision == "bf16"
        self._denoising, self._sampler = denoising, denoising.make_sampler()
        self.make_timesteps = lru_cache(maxsize=8)(lambda steps: denoising.make_timesteps(model, steps))
        self._encode_prompt = lru_cache(maxsize=_MAX_CACHED_PROMPTS)(self._encode)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[C, H, W] of a latent."""
        found: tuple[int, int, int] = self.model.latent_shape
        return found

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer moves, by name."""
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Return all weights, each tensor once: the live ones, or merged copies with LoRA."""
        return merge_adapters(self.model) if self.has_adapters else drop_tied_duplicates(self.model.state_dict())

    def noise_levels(self, path_lengths: Sequence[int], steps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the noise levels before and after each of `steps`, [N]; each lies on a path of the given length."""
        paths = [(self.make_timesteps(length), step) for length, step in zip(path_lengths, steps, strict=True)]
        s_N2 = torch.tensor([(float(path[at]), float(path[at + 1])) for path, at in paths], device=self._device)
        return s_N2[:, 0], s_N2[:, 1]

    def velocity(
        self, x_NCHW: Tensor, s_N: Tensor, prompts: Sequence[str], values: FrozenPolicy | None = None
    ) -> Tensor:
        """Predict the velocity with the guidance of training; `values` is a copy to predict with instead."""
        v_NCHW = self._forward(x_NCHW, s_N, prompts, values)
        if self._denoising.guidance == 1.0:
            return v_NCHW
        unconditional = self._forward(x_NCHW, s_N, [""] * len(prompts), values)
        return apply_guidance(v_NCHW, unconditional, self._denoising.guidance)

    def transition(
        self,
        x_NCHW: Tensor,
        s_N: Tensor,
        next_N: Tensor,
        prompts: Sequence[str],
        values: FrozenPolicy | None = None,
    ) -> LatentTransition:
        """Return the distribution of the step that starts at `x_NCHW`, with gradients if they are enabled."""
        return self._sampler.step(x_NCHW, self.velocity(x_NCHW, s_N, prompts, values), s_N, next_N)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Switch the adapters off inside the block, which makes the model the initial policy again."""
        if not self.has_adapters:
            raise ConfigError("only LoRA can be switched off", key="lora", value=None)
        _set_adapters_enabled(self.model, False)
        try:
            yield
        finally:
            _set_adapters_enabled(self.model, True)

    def freeze(self) -> FrozenPolicy:
        """Return a copy of the policy as it is now."""
        return FrozenPolicy(values=copy_tensors(self.trainable()))

    def initial_policy(self, reference: FrozenPolicy | None) -> AbstractContextManager[None]:
        """Return the context for calls with `reference` as values; None means LoRA, whose adapters are switched off."""
        return self.without_adapters() if reference is None else nullcontext()

    def _forward(self, x_NCHW: Tensor, s_N: Tensor, prompts: Sequence[str], values: FrozenPolicy | None) -> Tensor:
        conditioning = Conditioning.concatenate([self._encode_prompt(prompt) for prompt in prompts])
        with self._autocast():
            if values is None:
                found: Tensor = self.model(x_NCHW, s_N, conditioning)
            elif values.module is not None:
                found = values.module(x_NCHW, s_N, conditioning)
            else:
                found = functional_call(self.model, dict(values.values), (x_NCHW, s_N, conditioning))
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def _encode(self, prompt: str) -> Conditioning:
        with torch.no_grad():
            found: Conditioning = self.model.encode([prompt])
        return found.to(self._device)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.split(":")[0], torch.bfloat16) if self._half else nullcontext()


def _attach_adapters(model: nn.Module, settings: LoraSettings) -> None:
    """Put LoRA adapters of `peft` into the linear layers of `model` and freeze everything else."""
    peft = import_optional("peft", extra="lora", key="lora", value=settings, problem="LoRA needs peft")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    suffixes = tuple(f".{target}" for target in settings.targets)
    targets = [name for name in linears if not suffixes or f".{name}".endswith(suffixes)]
    if not targets:
        known = sorted({name.split(".")[-1] for name in linears})
        raise ConfigError("no linear layer has such a name", key="lora_target", value=settings.targets, hint=str(known))
    config = peft.LoraConfig(r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=targets)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        peft.inject_adapter_in_model(config, model)


def _set_adapters_enabled(model: nn.Module, enabled: bool) -> None:
    """Switch all adapters of `model` on or off."""
    for module in model.modules():
        if hasattr(module, "get_delta_weight"):  # a layer of peft, which may not be installed
            module.enable_adapters(enabled)  # type: ignore[operator]
