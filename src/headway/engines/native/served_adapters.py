"""Adapters as the weights of a version, on top of base weights that are served once and for all.

`AdapterParameters` stands in the place of `ServedParameters`: a version has the tensors `<layer>.lora_A.weight` (rank,
in) and `<layer>.lora_B.weight` (out, rank) of every adapted layer and nothing else. Layers add s · (x · Aᵀ) · Bᵀ to
their product. Layers that are served as one have their A's below each other and their B's in a block diagonal.

Base weights that lie on the device in the type of the engine are not copied: the trainer's memory is served. Layers
that are served as one need neighbouring rows for that, which `models.frozen_base` provides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from headway.engines.native.served_linear import ServedLinear
from headway.engines.native.served_parameters import DeviceParameters, ServedParameters, TensorPlace
from headway.engines.native.settings import AdapterSettings
from headway.models.frozen_base import find_adapted_layers, join_neighbours

DOWN, UP = "lora_A.weight", "lora_B.weight"


class AdapterParameters(DeviceParameters):
    """The parameters of a version that consists of adapters. Making it serves the base."""

    def __init__(
        self, base: ServedParameters, layers: list[str], settings: AdapterSettings, device: torch.device
    ) -> None:
        self._layout, self._dtype, self._integers, self._device = base._layout, base._dtype, {}, device
        self._installed, self._rank = None, settings.rank
        self._canonical, self._shapes, self._places, self._units = {}, {}, {}, {}
        self._sizes: dict[str, list[tuple[str, int]]] = {}
        """Names and widths of the layers that each unit is served for, those without adapters included."""
        adapted = {f"{layer}.weight" for layer in layers}
        for unit in dict.fromkeys(base._units[base._canonical[name]] for name in sorted(adapted)):
            self._add_unit(unit, adapted, base, settings)
        base.install(share_base(base, settings.load_base(), device))
        self.base = base

    def _add_unit(
        self, unit: tuple[str, ...], adapted: set[str], base: ServedParameters, settings: AdapterSettings
    ) -> None:
        """Add the adapters of the layers that are served as one."""
        layer = base._places[unit[0]][0].module
        assert isinstance(layer, ServedLinear)
        layer.adapter_scale = settings.scale
        members: list[str] = []
        for name in unit:
            if name in adapted:
                stem, (out, width) = name.removesuffix("weight"), base._shapes[name]
                self._shapes |= {stem + DOWN: (settings.rank, width), stem + UP: (out, settings.rank)}
                members += [stem + DOWN, stem + UP]
        self._canonical |= {name: name for name in members}
        self._units |= dict.fromkeys(members, tuple(members))
        self._places[members[0]] = [
            TensorPlace(layer, "down", prepared=False),
            TensorPlace(layer, "up", prepared=False),
        ]
        self._sizes[members[0]] = [(name.removesuffix("weight"), base._shapes[name][0]) for name in unit]

    @torch.no_grad()
    def _lay_out_unit(self, unit: tuple[str, ...], members: list[Tensor]) -> tuple[Tensor, ...]:
        found, rank = dict(zip(unit, members, strict=True)), self._rank
        sizes = self._sizes[unit[0]]
        down = torch.cat([found[name] for name in unit if name.endswith(DOWN)]).to(self._device)
        up = torch.zeros(sum(size for _, size in sizes), len(down), dtype=self._dtype, device=self._device)
        row = column = 0
        for stem, size in sizes:
            if stem + UP in found:
                up[row : row + size, column : column + rank] = found[stem + UP]
                column += rank
            row += size
        return nn.Parameter(down, requires_grad=False), nn.Parameter(up, requires_grad=False)


def share_base(
    base: ServedParameters, tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, tuple[Tensor, ...]]:
    """Return the base as it is served: the memory of `tensors` where it can be served as it lies, else copies."""
    values: dict[str, tuple[Tensor, ...]] = {}
    parts: dict[str, Tensor] = {}
    canonical = {base.canonical(name): tensor.detach() for name, tensor in tensors.items()}
    for unit in dict.fromkeys(base._units.values()):
        members, places = [canonical[name] for name in unit], base._places[unit[0]]
        whole = join_neighbours(members)
        as_it_lies = isinstance(base, DeviceParameters) and places[-1].attribute != "scale"
        if as_it_lies and whole is not None and (whole.device, whole.dtype) == (device, base._read_dtype(unit[0])):
            values[unit[0]] = tuple(nn.Parameter(whole, requires_grad=False) for _ in places)
            continue
        for name, member in zip(unit, members, strict=True):
            base.collect(name, member.to(base._read_dtype(name)), parts, values)
    return values


def add_adapters(
    model: nn.Module, make: Callable[[], ServedParameters], settings: AdapterSettings | None, device: torch.device
) -> ServedParameters:
    """Return what `make` returns, or the parameters of adapters on top of it."""
    if settings is None:
        return make()
    layers = find_adapted_layers(model, settings.targets)
    return AdapterParameters(make(), layers, settings, device)
