"""The frozen weights of a model with adapters: one copy in memory for everybody on a device who computes with them.

A trainer puts its model into a `FrozenBase`, and an engine of the same process serves the same memory. Layers that an
engine computes as one product lie side by side, so that neither side needs a copy of its own. What is in here is never
written again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import EngineCrashed

FUSED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers with one input, by the names that most models give them."""


class FrozenBase:
    """Frozen weights by name, all on one device and in one type. It is filled by the first model put in."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = torch.device(device), dtype
        self._tensors: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def adopt(self, model: Any) -> Any:
        """Let the parameters of `model` be those held here, and return it. The first model brings the values."""
        parameters = dict(model.named_parameters())
        with self._lock, torch.no_grad():
            if not self._tensors:
                buffers = {name: one for name, one in list_saved_tensors(model).items() if name not in parameters}
                self._tensors = self._pack(parameters) | {name: one.to(self._device) for name, one in buffers.items()}
            for name, one in parameters.items():
                one.data = self._tensors[name]
        return model

    def read(self) -> Mapping[str, Tensor]:
        """Return the tensors. Raises `EngineCrashed` before a model was put in."""
        if not self._tensors:
            raise EngineCrashed("there is no trainer yet whose base could be served")
        return self._tensors

    def _pack(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the device, those of one group behind each other."""
        found = {}
        for group in group_for_fusing(parameters):
            tensors = [parameters[name] for name in group]
            flat = torch.empty(sum(one.numel() for one in tensors), dtype=self._dtype, device=self._device)
            place = 0
            for name, one in zip(group, tensors, strict=True):
                found[name] = flat[place : place + one.numel()].view(one.shape).copy_(one)
                place += one.numel()
        return found


def list_saved_tensors(model: Any) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, tied ones once."""
    saved = model.state_dict(keep_vars=True)
    named = dict(model.named_parameters())
    return named | {name: one for name, one in model.named_buffers() if name in saved}


def group_for_fusing(names: Iterable[str]) -> list[list[str]]:
    """Return the names in groups: tensors of layers that are computed as one are together and in order."""
    left, found = dict.fromkeys(names), []
    for name in list(left):
        if name not in left:
            continue
        prefix, _, rest = name.rpartition(".")
        owner, _, layer = prefix.rpartition(".")
        fused = next((layers for layers in FUSED_LAYERS if layer in layers), ())
        group = [f"{owner}.{one}.{rest}" for one in fused]
        group = group if group and all(one in left for one in group) else [name]
        found.append(group)
        for one in group:
            del left[one]
    return found


def join_neighbours(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over all rows of `tensors` without copying them; None if they do not lie side by side."""
    first, rows, end = tensors[0], 0, tensors[0].data_ptr()
    for one in tensors:
        apart = one.data_ptr() != end or one.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if apart or not one.is_contiguous() or one.shape[1:] != first.shape[1:] or one.dtype != first.dtype:
            return None
        rows, end = rows + len(one), end + one.numel() * one.element_size()
    return first.as_strided((rows, *first.shape[1:]), first.stride()) if len(tensors) > 1 else first


def find_adapted_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that get adapters: those named, or all but the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and (name.rpartition(".")[2] in targets if targets else layer is not head)
    ]
