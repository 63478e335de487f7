"""The weights of a model as something that can be exchanged whole.

`ServedParameters` knows where every tensor of a model lives; `ServedValues` are the tensors of one version, already in the dtype
and the order of memory that is served. Installing them moves pointers only. Tied tensors are one tensor under several
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headway.engines.native.served_linear import FusedLinearSlice, PlainLayout, ServedLinear, WeightLayout
from headway.errors import TransferError

ServedValues = Mapping[str, tuple[Tensor, ...]]
"""By unit, one tensor for every place."""


class TensorPlace(NamedTuple):
    """Where a tensor lives."""

    module: nn.Module
    attribute: str
    prepared: bool
    """In the layout of linear layers, not as it came."""


_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers with one input, by the names that most models give them."""


class ServedParameters:
    """Built once from a fresh model, whose own tensors are given up for empty ones."""

    served_in_place = True
    """The tensors of a version are those that are served from then on; else they are copied, and can go."""

    def __init__(self, model: nn.Module, layout: WeightLayout, dtype: torch.dtype) -> None:
        self._layout = layout
        self._dtype = dtype
        self._canonical: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, list[TensorPlace]] = {}
        """By unit: one tensor, or several that are served as one."""
        self._units: dict[str, tuple[str, ...]] = {}
        """By canonical name, all names of its unit; the first one stands for it."""
        stand_ins: dict[int, nn.Module] = {}
        places = self._fuse(model, stand_ins)
        owners: dict[int, str] = {}
        kept = set(model.state_dict())
        for prefix, module in list(model.named_modules(remove_duplicate=False)):
            for attribute, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                name = f"{prefix}.{attribute}" if prefix else attribute
                if name in kept:
                    place = places.get(name) or _place(module, attribute, stand_ins, layout)
                    self._enter(name, owners.setdefault(id(tensor), name), tensor, place)
        self._replace(model, stand_ins)

    def _fuse(self, model: nn.Module, stand_ins: dict[int, nn.Module]) -> dict[str, TensorPlace]:
        """Find layers to serve as one; where the tensors of each will live."""
        places = {}
        for prefix, module in model.named_modules():
            for names in _FUSED:
                layers = [getattr(module, name, None) for name in names]
                linears = [layer for layer in layers if type(layer) is nn.Linear]
                biases = {layer.bias is not None for layer in linears}
                if len(linears) != len(names) or len(biases) != 1:
                    continue
                whole, shelf = ServedLinear(self._layout), list[Tensor]()
                sizes = [layer.out_features for layer in linears]
                for number, layer in enumerate(linears):
                    stand_ins[id(layer)] = FusedLinearSlice(whole, sizes, number, shelf)
                for attribute in ("weight", "bias")[: 1 + biases.pop()]:
                    unit = tuple(f"{prefix}.{name}.{attribute}" for name in names)
                    self._units.update(dict.fromkeys(unit, unit))
                    places.update(dict.fromkeys(unit, _served_place(whole, attribute)))
        return places

    def _enter(self, name: str, canonical: str, tensor: Tensor, place: TensorPlace) -> None:
        self._canonical[name] = canonical
        self._shapes[name] = tuple(tensor.shape)
        unit = self._units.setdefault(canonical, (canonical,))
        places = self._places.setdefault(unit[0], [])
        if place not in places:
            places.append(place)

    def _replace(self, model: nn.Module, stand_ins: dict[int, nn.Module]) -> None:
        """Put our linear layers in, and free what the model was made with."""
        for module in list(model.modules()):
            for child, old in list(module.named_children()):
                if id(old) in stand_ins:
                    setattr(module, child, stand_ins[id(old)])
        for places in self._places.values():
            for module, attribute, _ in places:
                if attribute in module._parameters:
                    module._parameters[attribute] = nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def names(self) -> frozenset[str]:
        """Canonical names: what a version must bring."""
        return frozenset(self._units)

    def canonical(self, name: str) -> str | None:
        """The name that stands for all places tied to `name`; none where the model has no such tensor."""
        return self._canonical.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """As it has to arrive."""
        return self._shapes[name]

    def empty(self, name: str) -> Tensor:
        """Room for it to arrive in."""
        return torch.empty(self._shapes[name], dtype=self._dtype)

    def collect(
        self, name: str, tensor: Tensor, parts: dict[str, Tensor], values: dict[str, tuple[Tensor, ...]]
    ) -> None:
        """Enter one canonical tensor of a version; a unit that is whole goes from `parts` to `values`, as served."""
        parts[name] = tensor
        unit = self._units[name]
        if not all(member in parts for member in unit):
            return
        members = [parts.pop(member) for member in unit]
        whole = members[0] if len(members) == 1 else torch.cat(members)
        values[unit[0]] = self._served(whole, self._places[unit[0]])

    def _served(self, whole: Tensor, places: list[TensorPlace]) -> tuple[Tensor, ...]:
        """One tensor for every place."""
        return tuple(
            self._layout.prepare(whole) if place.prepared else nn.Parameter(whole, requires_grad=False)
            for place in places
        )

    def prepared(self, tensors: Mapping[str, Tensor]) -> ServedValues:
        """All of `tensors` as they will be served. Raises `TransferError` where they are not a whole version."""
        values: dict[str, tuple[Tensor, ...]] = {}
        parts: dict[str, Tensor] = {}
        seen: set[str] = set()
        for name, tensor in tensors.items():
            canonical = self._canonical.get(name)
            if canonical is None or tuple(tensor.shape) != self._shapes[name]:
                raise TransferError(f"{name}: the model has no tensor of this name and shape {tuple(tensor.shape)}")
            if canonical not in seen:
                seen.add(canonical)
                self.collect(canonical, tensor.detach().to(self._dtype), parts, values)
        if missing := self.names - seen:
            raise TransferError(f"{len(missing)} tensors are missing, {min(missing)!r} among them")
        return values

    def install(self, values: ServedValues) -> None:
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


def _place(module: nn.Module, attribute: str, stand_ins: dict[int, nn.Module], layout: WeightLayout) -> TensorPlace:
    if type(module) is not nn.Linear:
        return TensorPlace(module, attribute, prepared=False)
    return _served_place(stand_ins.setdefault(id(module), ServedLinear(layout)), attribute)


def _served_place(served: nn.Module, attribute: str) -> TensorPlace:
    return TensorPlace(served, "prepared" if attribute == "weight" else "added", prepared=attribute == "weight")


class DeviceParameters(ServedParameters):
    """`ServedParameters` of a model whose tensors are served on `device`."""

    served_in_place = False

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, PlainLayout(), dtype)
        self._device = device
        self._installed: ServedValues | None = None

    @property
    def bytes(self) -> int:
        """Of one version."""
        return sum(torch.Size(self._shapes[name]).numel() for name in self.names) * self._dtype.itemsize

    def empty(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)

    def _served(self, whole: Tensor, places: list[TensorPlace]) -> tuple[Tensor, ...]:
        own = nn.Parameter(whole.to(self._device, copy=True), requires_grad=False)
        return tuple(own for _ in places)

    @torch.no_grad()
    def install(self, values: ServedValues) -> None:
        if self._installed is None:
            super().install(values)
            self._installed = values
            own = [tensors[0] for tensors in values.values()]
            torch._foreach_copy_(own, [tensor.detach() for tensor in own])  # loads the kernel while nobody decodes yet
            return
        if values.keys() != self._installed.keys():
            raise KeyError(f"not a whole version: {sorted(values.keys() ^ self._installed.keys())[:3]}")
        there = [self._installed[name][0] for name in values]
        arrived = [tensors[0] for tensors in values.values()]
        torch._foreach_copy_(there, arrived)
        for tensor in arrived:  # made on another stream, and let go before the copy has been made
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
