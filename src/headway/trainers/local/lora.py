"""LoRA adapters through `peft`, which is imported only where adapters are configured.

Guarantees: only adapters train, in the precision of the model. Merged weights have the names and shapes of the model
without adapters. Adapters start as the identity, so a model with fresh adapters computes what it computed before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headway.errors import ConfigError
from headway.extras import import_optional
from headway.trainers.local.settings import LoraSettings

ADAPTER_NAME = "default"
"""The name that `peft` gives to the only adapter."""


def attach_adapters(model: Any, settings: LoraSettings) -> Any:
    """Put adapters into `model` and return the `peft` model, which can switch them off."""
    peft = import_optional("peft", extra="lora", key="lora", value=settings, problem="LoRA needs peft")
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=list(settings.targets) if settings.targets else "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigError(str(error), key="lora_target", value=list(settings.targets)) from error
    _check_head(model, settings)
    for name, one in model.named_parameters():
        if ".lora_" in name:  # on weights in 4 bits they would stay in float32
            one.data = one.data.to(model.get_output_embeddings().weight.dtype)
    fuse_adapted_layers(model)
    return adapted


def _check_head(model: Any, settings: LoraSettings) -> None:
    """Refuse adapters on the head: log-probabilities use its plain weights, so they would never be trained."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    if hasattr(head, "get_delta_weight") or (tied and hasattr(embedding, "get_delta_weight")):
        raise ConfigError(
            "the head has no adapters", key="lora_target", value=list(settings.targets), hint="without it"
        )


def fuse_adapted_layers(model: Any) -> int:
    """Let plain linear layers with adapters compute as `AdaptedProduct`, and return how many do."""
    from peft.tuners.lora import Linear

    found = [
        module
        for module in model.modules()
        if type(module) is Linear and type(module.base_layer) is nn.Linear and not module.use_dora.get(ADAPTER_NAME)
    ]
    for module in found:
        module.forward = partial(_multiply_adapted, module, module.forward)
    return len(found)


def _multiply_adapted(module: Any, usual: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if module.disable_adapters or module.merged:
        return usual(x)
    base, down, up = module.base_layer, module.lora_A[ADAPTER_NAME].weight, module.lora_B[ADAPTER_NAME].weight
    apply: Any = AdaptedProduct.apply
    found: Tensor = apply(x, base.weight, base.bias, down, up, module.scaling[ADAPTER_NAME])
    return found


class AdaptedProduct(torch.autograd.Function):
    """x · Wᵀ + b + s · (x · Aᵀ) · Bᵀ with a frozen W, in matrix products alone: nothing is scaled or added by itself.

    The bias is frozen like W. Kept for the backward pass are x and x · Aᵀ, which is as narrow as the rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        narrow = flat @ down.t()
        product = linear(flat, weight, bias).addmm_(narrow, up.t(), alpha=scale)
        ctx.save_for_backward(flat, narrow, weight, down, up)
        ctx.scale, ctx.shape = scale, x.shape
        return product.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, narrow, weight, down, up = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        back = (grad @ up).mul_(ctx.scale)
        for_up = (grad.t() @ narrow).mul_(ctx.scale)
        for_x = (grad @ weight).addmm_(back, down).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return for_x, None, None, back.t() @ flat, for_up, None


def merge_adapters(model: Any) -> dict[str, Tensor]:
    """Return the weights with their adapters added, by the names they have without adapters.

    Expert layers, which have several weights in one module, have one adapter around the other.
    """
    adapted, quantized = find_adapted_modules(model), _find_quantized_weights(model)
    found = {}
    with torch.no_grad():
        for name, tensor in drop_tied_duplicates(model.state_dict()).items():
            base_name = strip_adapter_name(name)
            if ".lora_" in name or f"{base_name.rpartition('.weight.')[0]}.weight" in quantized:
                continue  # adapters, and the scales of weights in 4 bits
            if base_name in quantized:
                tensor = _dequantize(quantized[base_name])
            if base_name in adapted:
                tensor = tensor + adapted[base_name].get_delta_weight(ADAPTER_NAME).to(tensor.dtype)
            found[base_name] = tensor
    return found


def _find_quantized_weights(model: Any) -> dict[str, Any]:
    """Return weights in 4 bits by the names they have without adapters."""
    return {
        f"{strip_adapter_name(name)}.weight": module.weight
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None
    }


def _dequantize(weight: Any) -> Tensor:
    """Return what a weight in 4 bits stands for, in the type that it is computed in."""
    from bitsandbytes.functional import dequantize_4bit

    values: Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return values.to(weight.quant_state.dtype)


def get_shape(weight: Any) -> torch.Size:
    """Return the shape of a weight; one in 4 bits is stored flat."""
    state = getattr(weight, "quant_state", None)
    return torch.Size(weight.shape if state is None else state.shape)


def list_adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Return the live adapters as `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, the names that `peft` saves."""
    return {
        name.replace(f".{ADAPTER_NAME}.weight", ".weight"): one.detach()
        for name, one in model.named_parameters()
        if ".lora_" in name
    }


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
