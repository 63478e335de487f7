"""LoRA adapters through `peft`, which is imported only where adapters are configured.

Guarantees: only adapters train. Merged weights have the names and shapes of the model without adapters. Adapters start
as the identity, so a model with fresh adapters computes what it computed before.
"""

from typing import Any

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.extras import suggest_install
from headway.trainers.local.settings import LoraSettings

ADAPTER_NAME = "default"
"""The name that `peft` gives to the only adapter."""


def attach_adapters(model: Any, settings: LoraSettings) -> Any:
    """Put adapters into `model` and return the `peft` model, which can switch them off."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("LoRA needs peft", key="lora", value=settings, hint=suggest_install("lora")) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=list(settings.targets) if settings.targets else "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(str(error), key="lora_target", value=list(settings.targets)) from error
    _check_head(model, settings)
    return adapted


def _check_head(model: Any, settings: LoraSettings) -> None:
    """Refuse adapters on the head: log-probabilities use its plain weights, so they would never be trained."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    if hasattr(head, "get_delta_weight") or (tied and hasattr(embedding, "get_delta_weight")):
        raise ConfigError(
            "the head has no adapters", key="lora_target", value=list(settings.targets), hint="without it"
        )


def merge_adapters(model: Any) -> dict[str, Tensor]:
    """Return the weights with their adapters added, by the names they have without adapters.

    Expert layers, which have several weights in one module, have one adapter around the other.
    """
    adapted = find_adapted_modules(model)
    found = {}
    with torch.no_grad():
        for name, tensor in drop_tied_duplicates(model.state_dict()).items():
            if ".lora_" in name:
                continue
            base_name = strip_adapter_name(name)
            if base_name in adapted:
                tensor = tensor + adapted[base_name].get_delta_weight(ADAPTER_NAME).to(tensor.dtype)
            found[base_name] = tensor
    return found


def find_adapted_modules(model: Any) -> dict[str, Any]:
    """Return the modules that have adapters, by the names that their weights have without them."""
    return {
        f"{strip_adapter_name(name)}.{getattr(module, 'parameter_name', 'weight')}": module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def strip_adapter_name(name: str) -> str:
    """Return the name that a weight had before adapters were attached."""
    return name.replace(".base_layer", "")


def drop_tied_duplicates(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop second names of the same memory, so that tied embeddings are published and saved once."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or key not in seen:
            seen.add(key)
            found[name] = tensor.detach()
    return found
