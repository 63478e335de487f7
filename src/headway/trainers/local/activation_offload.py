"""Activations in host memory: what the backward pass needs leaves the GPU as soon as it was computed.

Copies run on a stream of their own. In the backward pass tensors are fetched ahead in the opposite order, so that they
are there when their turn comes. Copies change no number.

Guarantees: a tensor that several operations of a layer keep is copied once. Weights, and tensors that are small, stay.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

SMALLEST_BYTES = 2**20
"""Size from which a tensor is worth a copy."""
FETCH_AHEAD_BYTES = 2**31
"""Size of the tensors that are fetched before they are needed."""
_RECENT = 8
"""Number of tensors that are recognised when they are saved again. They stay on the device as long."""


class ActivationOffload:
    """A context for one forward pass; tensors that are saved inside go to the host until its backward pass."""

    def __init__(self, model: torch.nn.Module, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
        self._smallest_bytes = smallest_bytes
        self._saved: list[_HostTensor] = []
        """All tensors on the host, in the order in which they were saved."""
        self._recent: deque[tuple[Tensor, _HostTensor]] = deque(maxlen=_RECENT)
        self._unfetched = 0
        """Number of tensors at the beginning of `_saved` that were not fetched yet."""
        self._ahead_bytes = 0
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> ActivationOffload:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._recent.clear()
        self._unfetched = len(self._saved)

    def _pack(self, tensor: Tensor) -> Tensor | tuple[_HostTensor, Tensor]:
        """Return the tensor itself, or where it is and a tensor without memory that has its shape."""
        if (
            tensor.numel() * tensor.element_size() < self._smallest_bytes
            or tensor.untyped_storage().data_ptr() in self._weights
            or not _is_dense(tensor)
        ):
            return tensor
        found = next((host for recent, host in self._recent if _is_same_memory(recent, tensor)), None)
        if found is None:
            found = _HostTensor(tensor)
            self._saved.append(found)
            self._recent.append((tensor.detach(), found))
        found.uses += 1
        return found, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _unpack(self, saved: Tensor | tuple[_HostTensor, Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        host, form = saved
        self._ahead_bytes += host.fetch()
        while self._unfetched and self._ahead_bytes < FETCH_AHEAD_BYTES:
            self._unfetched -= 1
            self._ahead_bytes += self._saved[self._unfetched].fetch()
        found = host.wait()
        host.uses -= 1
        if not host.uses:
            self._ahead_bytes -= host.release()
        return found.as_strided(form.shape, form.stride())


class _HostTensor:
    """The memory of a tensor on the host, and on the device while it is needed there."""

    def __init__(self, tensor: Tensor) -> None:
        self.uses = 0
        """Number of times that it will be needed."""
        self._device = tensor.device
        self._there: Tensor | None = None
        self._fetched: Any = None
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._host = torch.empty_like(flat, device="cpu", pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self._host.copy_(flat)
            return
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)
        tensor.record_stream(stream)

    def fetch(self) -> int:
        """Begin to copy the memory to the device, and return its size; 0 if it is there, or not needed any more."""
        if self._there is not None or not self.uses:
            return 0
        self._there = torch.empty_like(self._host, device=self._device)
        if self._device.type == "cuda":
            stream = _copy_stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))  # memory may still be read by its last owner
            with torch.cuda.stream(stream):
                self._there.copy_(self._host, non_blocking=True)
                self._fetched = stream.record_event()
        else:
            self._there.copy_(self._host)
        return self._bytes

    def wait(self) -> Tensor:
        """Return the memory on the device, which the current stream waits for."""
        assert self._there is not None
        if self._fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(self._fetched)
        return self._there

    def release(self) -> int:
        """Forget the memory on the device, and return its size."""
        self._there = self._fetched = None
        return self._bytes

    @property
    def _bytes(self) -> int:
        return self._host.numel() * self._host.element_size()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor covers its memory without gaps, in whatever order of dimensions."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return extent == tensor.numel()


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.numel(), one.dtype, one._version) == (
        other.data_ptr(),
        other.numel(),
        other.dtype,
        other._version,
    )


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
