"""Exchanges the weights of a model as a whole.

`ServedParameters` knows where every tensor of a model lives; `ServedValues` are the tensors of one version, already in
the dtype and the layout that is served. On a CPU installing them moves pointers only. On a GPU served tensors stay at
their addresses, because captured graphs refer to them: the first version becomes the served tensors, and every later
one is copied into them between two blocks. So a version needs its memory twice while it arrives, and once afterwards;
or once, where nobody computes while it arrives and each unit is replaced at once (`replace`).
Tied tensors are one tensor under several names.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headway.engines.native.quantized_products import FP8, can_quantize, quantize_rows
from headway.engines.native.served_linear import FusedLinearSlice, ServedLinear, WeightLayout
from headway.errors import TransferError
from headway.models.frozen_base import FUSED_LAYERS
from headway.models.model_checks import print_once

ServedValues = Mapping[str, tuple[Tensor, ...]]
"""Tensors of each unit, one for every place that the unit is served in."""


class TensorPlace(NamedTuple):
    """Where a tensor lives."""

    module: nn.Module
    attribute: str
    prepared: bool
    """Whether it is stored in the layout of linear layers instead of as it came."""


class ServedParameters:
    """Built once from a fresh model, whose own tensors are replaced by empty ones.

    Linear layers are replaced by those of `layout`; without one the modules stay as they are.
    """

    served_in_place = True
    """Whether the tensors of a version are served themselves; otherwise they are copied and can be freed."""

    def __init__(self, model: nn.Module, layout: WeightLayout | None, dtype: torch.dtype) -> None:
        self._layout = layout or WeightLayout()
        self._dtype = dtype
        self._integers: dict[str, torch.dtype] = {}
        """Types of the tensors that are not fractions, by name."""
        self._canonical: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, list[TensorPlace]] = {}
        """Places of each unit, which is one tensor, or several that are served as one."""
        self._units: dict[str, tuple[str, ...]] = {}
        """Names of the unit of each canonical name; the first one stands for the unit."""
        replacements: dict[int, nn.Module] = {}
        places = {} if layout is None else self._fuse(model, replacements)
        owners: dict[int, str] = {}
        saved = set(model.state_dict())
        for prefix, module in list(model.named_modules(remove_duplicate=False)):
            for attribute, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                name = f"{prefix}.{attribute}" if prefix else attribute
                if name in saved:
                    place = places.get(name) or _find_place(module, attribute, replacements, layout)
                    self._add_place(name, owners.setdefault(id(tensor), name), tensor, place)
        self._replace(model, replacements)

    def _fuse(self, model: nn.Module, replacements: dict[int, nn.Module]) -> dict[str, TensorPlace]:
        """Find layers to serve as one; returns where the tensors of each will live."""
        places: dict[str, TensorPlace] = {}
        for prefix, module in model.named_modules():
            for names in FUSED_LAYERS:
                layers = [getattr(module, name, None) for name in names]
                linears = [layer for layer in layers if type(layer) is nn.Linear]
                biases = {layer.bias is not None for layer in linears}
                if len(linears) != len(names) or len(biases) != 1:
                    continue
                whole, results = ServedLinear(self._layout), list[Tensor]()
                sizes = [layer.out_features for layer in linears]
                for number, layer in enumerate(linears):
                    replacements[id(layer)] = FusedLinearSlice(whole, sizes, number, results)
                for attribute in ("weight", "bias")[: 1 + biases.pop()]:
                    unit = tuple(f"{prefix}.{name}.{attribute}" for name in names)
                    self._units.update(dict.fromkeys(unit, unit))
                    places.update(dict.fromkeys(unit, _make_served_place(whole, attribute)))
        return places

    def _add_place(self, name: str, canonical: str, tensor: Tensor, place: TensorPlace) -> None:
        self._canonical[name] = canonical
        self._shapes[name] = tuple(tensor.shape)
        if not tensor.is_floating_point():
            self._integers[name] = tensor.dtype
        unit = self._units.setdefault(canonical, (canonical,))
        places = self._places.setdefault(unit[0], [])
        if place not in places:
            places.append(place)

    def _replace(self, model: nn.Module, replacements: dict[int, nn.Module]) -> None:
        """Put the served layers into the model, and free what it was made with."""
        for module in list(model.modules()):
            for child, old in list(module.named_children()):
                if id(old) in replacements:
                    setattr(module, child, replacements[id(old)])
        for places in self._places.values():
            for module, attribute, _ in places:
                if attribute in module._parameters:
                    module._parameters[attribute] = nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def names(self) -> frozenset[str]:
        """Canonical names of the tensors that a version must have."""
        return frozenset(self._units)

    def canonical(self, name: str) -> str | None:
        """Return the name that stands for all tensors tied to `name`; None where the model has no such tensor."""
        return self._canonical.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in which a tensor has to arrive."""
        return self._shapes[name]

    def empty(self, name: str) -> Tensor:
        """Return memory for a tensor to arrive in."""
        return torch.empty(self._shapes[name], dtype=self._read_dtype(name))

    def _read_dtype(self, name: str) -> torch.dtype:
        return self._integers.get(name, self._dtype)

    def collect(
        self, name: str, tensor: Tensor, parts: dict[str, Tensor], values: dict[str, tuple[Tensor, ...]]
    ) -> str | None:
        """Add one canonical tensor of a version. Return the name of its unit if that is complete now.

        A complete unit moves from `parts` to `values`, as it is served.
        """
        parts[name] = tensor
        unit = self._units[name]
        if not all(member in parts for member in unit):
            return None
        values[unit[0]] = self._lay_out_unit(unit, [parts.pop(member) for member in unit])
        return unit[0]

    def _lay_out_unit(self, unit: tuple[str, ...], members: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of a unit as they are served."""
        whole = members[0] if len(members) == 1 else torch.cat(members)
        return self._lay_out(whole, self._places[unit[0]])

    def _lay_out(self, whole: Tensor, places: list[TensorPlace]) -> tuple[Tensor, ...]:
        """Return one tensor for every place."""
        return tuple(
            self._layout.prepare(whole) if place.prepared else nn.Parameter(whole, requires_grad=False)
            for place in places
        )

    def prepare(self, tensors: Mapping[str, Tensor]) -> ServedValues:
        """Return all of `tensors` as they will be served. Raises `TransferError` where they are not a whole version."""
        values: dict[str, tuple[Tensor, ...]] = {}
        parts: dict[str, Tensor] = {}
        seen: set[str] = set()
        for name, tensor in tensors.items():
            canonical = self._canonical.get(name)
            if canonical is None or tuple(tensor.shape) != self._shapes[name]:
                raise TransferError(f"{name}: the model has no tensor of this name and shape {tuple(tensor.shape)}")
            if canonical not in seen:
                seen.add(canonical)
                self.collect(canonical, tensor.detach().to(self._read_dtype(name)), parts, values)
        if missing := self.names - seen:
            raise TransferError(f"{len(missing)} tensors are missing, {min(missing)!r} among them")
        return values

    def install(self, values: ServedValues) -> None:
        """Serve `values`: all of them or, where names do not match, none."""
        if values.keys() != self._places.keys():
            raise KeyError(f"not a whole version: {sorted(values.keys() ^ self._places.keys())[:3]}")
        for name, tensors in values.items():
            self._put(name, tensors)

    def replace(self, unit: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Serve one unit of a version before the others are here. Return the tensors that are served."""
        self._put(unit, tensors)
        return tensors

    def _put(self, unit: str, tensors: tuple[Tensor, ...]) -> None:
        for (module, attribute, _), tensor in zip(self._places[unit], tensors, strict=True):
            if isinstance(module, ServedLinear):
                setattr(module, attribute, tensor)
            elif attribute in module._parameters:
                module._parameters[attribute] = tensor  # type: ignore[assignment]
            else:
                module._buffers[attribute] = tensor.data


def _find_place(
    module: nn.Module, attribute: str, replacements: dict[int, nn.Module], layout: WeightLayout | None
) -> TensorPlace:
    if layout is None or type(module) is not nn.Linear:
        return TensorPlace(module, attribute, prepared=False)
    return _make_served_place(replacements.setdefault(id(module), ServedLinear(layout)), attribute)


def _make_served_place(served: nn.Module, attribute: str) -> TensorPlace:
    return TensorPlace(served, "prepared" if attribute == "weight" else "bias", prepared=attribute == "weight")


DEVICE_LAYOUT = WeightLayout()
_NEVER_QUANTIZED = frozenset({"gate", "router"})
"""Names of layers that choose experts: near ties would go to others."""


class DeviceParameters(ServedParameters):
    """`ServedParameters` of a model whose tensors are served on `device`.

    With `quantized`, linear layers are served in 8 bits, all but the head and the routers of mixtures. A tensor is
    quantized when it arrives, on the device.
    """

    served_in_place = False

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        layout: WeightLayout | None = DEVICE_LAYOUT,
        *,
        quantized: bool = False,
    ) -> None:
        super().__init__(model, layout, dtype)
        self._device = device
        self._installed: ServedValues | None = None
        if quantized:
            self._quantize_layers(model.get_output_embeddings())  # type: ignore[operator]

    def _quantize_layers(self, head: nn.Module) -> None:
        """Choose the layers that are served in 8 bits, and say what is not."""
        for unit, places in self._places.items():
            layer = places[0].module
            if len(places) > 1 or not isinstance(layer, ServedLinear) or not places[0].prepared or layer is head:
                continue
            shapes = [self._shapes[name] for name in self._units[unit]]
            whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            if can_quantize(whole) and unit.split(".")[-2] not in _NEVER_QUANTIZED:
                layer.quantized = True
                places.append(TensorPlace(layer, "scale", prepared=False))
        eighths = sum(self._count(name) for name in self._places if self._is_quantized(name))
        total = sum(self._count(name) for name in self._places)
        print_once(f"fp8: {eighths / total:.0%} of the weights are served in 8 bits, the others in bfloat16")

    def _is_quantized(self, unit: str) -> bool:
        return self._places[unit][-1].attribute == "scale"

    def _count(self, unit: str) -> int:
        return sum(torch.Size(self._shapes[name]).numel() for name in self._units[unit])

    @property
    def bytes(self) -> int:
        """Size of one version."""
        return sum(
            self._count(unit) * (1 if self._is_quantized(unit) else self._dtype.itemsize) for unit in self._places
        )

    def empty(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=self._read_dtype(name), device=self._device)

    @torch.no_grad()
    def _lay_out(self, whole: Tensor, places: list[TensorPlace]) -> tuple[Tensor, ...]:
        if places[-1].attribute == "scale":
            return tuple(quantize_rows(whole.to(self._device)))
        served = nn.Parameter(whole.to(self._device, copy=True), requires_grad=False)
        return tuple(served for _ in places)

    @torch.no_grad()
    def replace(self, unit: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._installed is None:  # the first version becomes the served tensors as a whole
            return tensors
        torch._foreach_copy_(_list_tensors({unit: self._installed[unit]}), _list_tensors({unit: tensors}))
        return self._installed[unit]

    @torch.no_grad()
    def install(self, values: ServedValues) -> None:
        if self._installed is None:
            super().install(values)
            self._installed = values
            served = _list_tensors(values)
            torch._foreach_copy_(
                served, [tensor.detach() for tensor in served]
            )  # loads the kernel before anybody decodes
            return
        if values.keys() != self._installed.keys():
            raise KeyError(f"not a whole version: {sorted(values.keys() ^ self._installed.keys())[:3]}")
        changed = [name for name in self._installed if values[name] is not self._installed[name]]
        if not changed:  # each was replaced when it arrived
            return
        arrived = _list_tensors({name: values[name] for name in changed})
        torch._foreach_copy_(_list_tensors({name: self._installed[name] for name in changed}), arrived)
        for tensor in arrived:  # made on another stream, and freed before the copy has been made
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _list_tensors(values: ServedValues) -> list[Tensor]:
    """Return every tensor once; 8-bit numbers as bytes, which are copied by any kernel."""
    found = [tensor for tensors in values.values() for tensor in {id(tensor): tensor for tensor in tensors}.values()]
    return [tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor for tensor in found]
