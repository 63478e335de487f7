"""LoRA through `peft`, which is needed only where adapters are asked for.

Guarantees: only adapters train; what is merged has the names and shapes of the model without them. Adapters begin as
the identity, so the model with fresh adapters is the model it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.trainers.local.settings import LoraSettings

ADAPTER_NAME = "default"
"""What `peft` calls the only one."""


def attach_adapters(model: Any, settings: LoraSettings) -> Any:
    """Put adapters into `model`; returns what can switch them off."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("LoRA needs peft", key="lora", value=settings, hint="pip install 'headway[lora]'") from error
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
            made = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(str(error), key="lora_target", value=list(settings.targets)) from error
    _check_head(model, settings)
    return made


def _check_head(model: Any, settings: LoraSettings) -> None:
    """Log-probabilities are made with the head's own weights: an adapter there would never be trained."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    if hasattr(head, "get_delta_weight") or (tied and hasattr(embedding, "get_delta_weight")):
        raise ConfigError(
            "the head has no adapters", key="lora_target", value=list(settings.targets), hint="without it"
        )


def merge_adapters(model: Any) -> dict[str, Tensor]:
    """Weights with their adapters added, by the names they have without adapters.

    Experts, several weights in one module, have one adapter around the other.
    """
    around = find_adapted_modules(model)
    found = {}
    with torch.no_grad():
        for name, tensor in drop_tied_duplicates(model.state_dict()).items():
            if ".lora_" in name:
                continue
            own = strip_adapter_name(name)
            if own in around:
                tensor = tensor + around[own].get_delta_weight(ADAPTER_NAME).to(tensor.dtype)
            found[own] = tensor
    return found


def find_adapted_modules(model: Any) -> dict[str, Any]:
    """What adapters are around, by the names that the weights have without them."""
    return {
        f"{strip_adapter_name(name)}.{getattr(module, 'parameter_name', 'weight')}": module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def strip_adapter_name(name: str) -> str:
    """As it was before adapters were put around it."""
    return name.replace(".base_layer", "")


def drop_tied_duplicates(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without second names for the same memory: tied embeddings travel and are saved once."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or key not in seen:
            seen.add(key)
            found[name] = tensor.detach()
    return found
