"""The weights of a model as something that can be exchanged whole.

`Parameters` knows where every tensor of a model lives; `Values` are the tensors of one version, already in the dtype
and the order of memory that is served. Installing them moves pointers only. Tied tensors are one tensor under several
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headway.engines.native.linears import Layout, ServedLinear
from headway.errors import TransferError

Values = Mapping[str, tuple[Tensor, ...]]
"""By canonical name, one tensor for every place."""


class Place(NamedTuple):
    """Where a tensor lives."""

    module: nn.Module
    attribute: str
    prepared: bool
    """In the layout of linear layers, not as it came."""


class Parameters:
    """Built once from a fresh model, whose own tensors are given up for empty ones."""

    def __init__(self, model: nn.Module, layout: Layout, dtype: torch.dtype) -> None:
        self._layout = layout
        self._dtype = dtype
        self._canonical: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, list[Place]] = {}
        owners: dict[int, str] = {}
        linears: dict[int, ServedLinear] = {}
        kept = {name for name in model.state_dict() if name}
        for prefix, module in list(model.named_modules(remove_duplicate=False)):
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for attribute, tensor in tensors:
                name = f"{prefix}.{attribute}" if prefix else attribute
                if name in kept:
                    self._enter(
                        name, owners.setdefault(id(tensor), name), tensor, _place(module, attribute, linears, layout)
                    )
        self._replace(model, linears)

    def _enter(self, name: str, canonical: str, tensor: Tensor, place: Place) -> None:
        self._canonical[name] = canonical
        self._shapes[name] = tuple(tensor.shape)
        places = self._places.setdefault(canonical, [])
        if place not in places:
            places.append(place)

    def _replace(self, model: nn.Module, linears: dict[int, ServedLinear]) -> None:
        """Put our linear layers in, and free what the model was made with."""
        for module in list(model.modules()):
            for child, old in list(module.named_children()):
                if id(old) in linears:
                    setattr(module, child, linears[id(old)])
        for places in self._places.values():
            for module, attribute, _ in places:
                if attribute in module._parameters:
                    module._parameters[attribute] = nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def names(self) -> frozenset[str]:
        """Canonical names: what a version must bring."""
        return frozenset(self._places)

    def canonical(self, name: str) -> str | None:
        """The name that stands for all places tied to `name`; none where the model has no such tensor."""
        return self._canonical.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """As it has to arrive."""
        return self._shapes[name]

    def empty(self, name: str) -> Tensor:
        """Room for it to arrive in."""
        return torch.empty(self._shapes[name], dtype=self._dtype)

    def served(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """What will stand in each place."""
        return tuple(
            self._layout.prepare(tensor) if place.prepared else nn.Parameter(tensor, requires_grad=False)
            for place in self._places[name]
        )

    def prepared(self, tensors: Mapping[str, Tensor]) -> Values:
        """All of `tensors` as they will be served. Raises `TransferError` where they are not a whole version."""
        values: dict[str, tuple[Tensor, ...]] = {}
        for name, tensor in tensors.items():
            canonical = self._canonical.get(name)
            if canonical is None or tuple(tensor.shape) != self._shapes[name]:
                raise TransferError(f"{name}: the model has no tensor of this name and shape {tuple(tensor.shape)}")
            if canonical not in values:
                values[canonical] = self.served(canonical, tensor.detach().to(self._dtype))
        if missing := self.names - values.keys():
            raise TransferError(f"{len(missing)} tensors are missing, {min(missing)!r} among them")
        return values

    def install(self, values: Values) -> None:
        """Serve `values`. All or nothing: names are checked first."""
        if values.keys() != self._places.keys():
            raise KeyError(f"not a whole version: {sorted(values.keys() ^ self._places.keys())[:3]}")
        for name, tensors in values.items():
            for (module, attribute, _), tensor in zip(self._places[name], tensors, strict=True):
                if isinstance(module, ServedLinear):
                    setattr(module, attribute, tensor)
                elif attribute in module._parameters:
                    module._parameters[attribute] = tensor  # type: ignore[assignment]
                else:
                    module._buffers[attribute] = tensor.data


def _place(module: nn.Module, attribute: str, linears: dict[int, ServedLinear], layout: Layout) -> Place:
    if type(module) is not nn.Linear:
        return Place(module, attribute, prepared=False)
    served = linears.setdefault(id(module), ServedLinear(layout))
    return Place(served, "prepared" if attribute == "weight" else "added", prepared=attribute == "weight")
