"""Weights on a GPU, at addresses that never change: what was captured into a graph stays right.

The first version becomes the served tensors; every later one is copied into them, between two blocks. So a version
needs its memory twice while it arrives, and once afterwards. Tied tensors are one tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway.engines.native.linears import Plain
from headway.engines.native.parameters import Parameters, Place, Values


class DeviceParameters(Parameters):
    """`Parameters` of a model whose tensors are served on `device`."""

    served_in_place = False

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, Plain(), dtype)
        self._device = device
        self._installed: Values | None = None

    @property
    def bytes(self) -> int:
        """Of one version."""
        return sum(torch.Size(self._shapes[name]).numel() for name in self.names) * self._dtype.itemsize

    def empty(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)

    def _served(self, whole: Tensor, places: list[Place]) -> tuple[Tensor, ...]:
        own = nn.Parameter(whole.to(self._device, copy=True), requires_grad=False)
        return tuple(own for _ in places)

    @torch.no_grad()
    def install(self, values: Values) -> None:
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
