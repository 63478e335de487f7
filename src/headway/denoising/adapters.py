"""LoRA inside a flow model through `peft`, and the description that a checkpoint of one carries.

Guarantees: only adapters train; they begin as the identity; `lora.merged` gives the weights back under the names that
the model has without them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.denoising.models.denoiser_storage import CONFIG, SMALL_MMDIT_TYPE
from headway.errors import ConfigError, TrainerError
from headway.trainers.local.settings import LoraSettings


def attach(model: nn.Module, settings: LoraSettings) -> None:
    """Put adapters into the linear layers of `model`; everything else is frozen."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("LoRA needs peft", key="lora", value=settings, hint="pip install 'headway[lora]'") from error
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    wanted = tuple(f".{target}" for target in settings.targets)
    targets = [name for name in linears if not wanted or f".{name}".endswith(wanted)]
    if not targets:
        last = sorted({name.split(".")[-1] for name in linears})
        raise ConfigError("no linear layer has such a name", key="lora_target", value=settings.targets, hint=str(last))
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=targets)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        inject_adapter_in_model(config, model)


def switch(model: nn.Module, *, on: bool) -> None:
    """Use adapters, or do not."""
    for module in model.modules():
        if hasattr(module, "get_delta_weight"):
            module.enable_adapters(on)  # type: ignore[operator]


class Described:
    """What a checkpoint writes beside the weights, so that it can be loaded as a model again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = self
        self.dtype: Any = None

    def save_pretrained(self, directory: Path) -> None:
        """The configuration of the model, by its own way where it has one."""
        own = getattr(self._model, "save_description", None)
        if own is not None:
            own(directory)
        elif is_dataclass(self._model.config) and not isinstance(self._model.config, type):
            shape = {"model_type": SMALL_MMDIT_TYPE, **asdict(self._model.config)}
            (directory / CONFIG).write_text(json.dumps(shape, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            raise TrainerError(f"{type(self._model).__name__} cannot be described in a checkpoint")
