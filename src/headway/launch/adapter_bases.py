"""The base weights under adapters that are versions of their own.

An engine that is a thread of the trainer's process serves the base from the trainer's memory, if both are on one GPU in
one type. Any other engine reads the base once from the model's directory. Models for which this is not possible get
merged weights, and one line says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.launch.components import ComponentArgs, LaunchContext

if TYPE_CHECKING:
    import torch

    from headway.engines.native.settings import AdapterSettings
    from headway.models.frozen_base import FrozenBase


def list_adaptable_layers(model: Any) -> tuple[list[str], str]:
    """Return the names of layers with a matrix of their own, and the name of the head."""
    found = [
        (name, layer)
        for name, layer in model.named_modules()
        if any(weight.ndim >= 2 for weight in layer.parameters(recurse=False))
    ]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name for name, layer in found if layer is not embedding]
    return names, next((name for name, layer in found if layer is head), "")


def find_adapter_problem(path: Path) -> str | None:
    """Return why adapters of this model cannot be served apart from their base; None if they can."""
    from torch import nn

    from headway.models.expert_routing import find_mixture
    from headway.models.model_checks import find_attention_problem
    from headway.models.model_loading import make_architecture_factory

    model = make_architecture_factory(path)()
    if find_mixture(model) is not None:
        return "it is a mixture of experts"
    if (problem := find_attention_problem(model, shorter_values=True)) is not None:
        return problem
    other = {type(part).__name__ for part in model.modules() if not isinstance(part, nn.Linear | nn.Embedding)}
    return "its layers are no plain linear ones" if other & {"Conv1D"} else None


def make_adapter_settings(args: ComponentArgs, base: FrozenBase | None) -> AdapterSettings:
    """Return what an engine must know to serve adapters: their shape, and where the base is."""
    from headway.engines.native.settings import AdapterSettings
    from headway.trainers.local.settings import make_lora_settings

    config = args.load_config().config
    lora = make_lora_settings(config.actor_train.model_args, config.seed)
    assert lora is not None
    return AdapterSettings(
        rank=lora.rank,
        scale=lora.alpha / lora.rank,
        targets=lora.targets,
        load_base=partial(_read_base, args.model, select_base_dtype(args)) if base is None else base.read,
    )


def make_frozen_base(context: LaunchContext) -> FrozenBase | None:
    """Return room for the frozen weights that the parts of this process share; None where they share none."""
    placement = context.placement
    if placement.processes or not placement.transport.adapters:
        return None

    from headway.models.frozen_base import FrozenBase

    return FrozenBase(placement.device, select_base_dtype(context.make_args(1)))


def make_base_loader(args: ComponentArgs) -> Callable[[], Any]:
    """Return what loads the frozen model under adapters: in the type of the computation, or in 4 bits."""
    from headway.models.model_loading import load_model

    quantized = args.load_config().config.actor_train.model_args.quantization is not None
    return partial(load_model, args.model, select_base_dtype(args), quantized_on=args.device if quantized else None)


def select_base_dtype(args: ComponentArgs) -> torch.dtype:
    """Return the type of weights that no optimizer changes: that of the trainer's computation."""
    import torch

    return torch.bfloat16 if args.select_precision(args.load_config()) == "bf16" else torch.float32


def _read_base(model: str, dtype: torch.dtype) -> Mapping[str, Any]:
    from headway.models.frozen_base import list_saved_tensors
    from headway.models.model_loading import load_model

    return list_saved_tensors(load_model(model, dtype))
