"""Collective calls of ranks that share a GPU: tensors go through memory of the card, or of the host.

NCCL refuses two ranks on one GPU, and gloo crashes on tensors of a GPU. So the calls that ranks make for split weights
are staged here: gathers and reductions of `fully_shard`, whole tensors, and sums. If all ranks are on one card, they
read each other's memory (`card_exchange`). Otherwise, and for sums, gloo exchanges what was copied to the host.
Everything else that ranks would exchange on the device (parts of layers, parts of sequences) is refused before the
start. On CPUs, and between GPUs with NCCL, nothing is staged.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from headway.trainers.sharded.card_exchange import CardExchange
from headway.weights.device_memory import CudaMemory


def is_staged(device: torch.device | str) -> bool:
    """Return whether collective calls on tensors of `device` go through the memory of the host."""
    return torch.device(device).type == "cuda" and dist.get_backend() == "gloo"


def all_reduce(tensor: Tensor, operation: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Reduce a tensor over the ranks, in place."""
    if not is_staged(tensor.device):
        dist.all_reduce(tensor, operation, group=group)
        return
    on_host = _copy_to_host(tensor)
    dist.all_reduce(on_host, operation, group=group)
    tensor.copy_(on_host)


def gather_whole(tensor: Any) -> Tensor:
    """Return all of a sharded tensor; every rank that holds a shard must call this."""
    if not is_staged(tensor.device):
        whole: Tensor = tensor.full_tensor()
        return whole
    mesh = tensor.device_mesh
    if tuple(tensor.placements) == (Shard(0),) and (exchange := _open_exchange(mesh.get_group())) is not None:
        return gather_rows(exchange, tensor.to_local(), tensor.shape, mesh.size())
    host_mesh = _make_host_mesh(tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()))
    found: Any = shard_like(tensor, _copy_to_host(tensor.to_local()), host_mesh).full_tensor()
    gathered: Tensor = found.to(tensor.device)
    return gathered


def gather_rows(exchange: CardExchange, local: Tensor, shape: torch.Size, ranks: int) -> Tensor:
    """Return a tensor of which each rank holds as many rows; the last ones may hold fewer, or none."""
    rows = -(-shape[0] // ranks)
    padded = local.new_zeros(rows, *shape[1:])
    padded[: len(local)] = local
    whole = local.new_empty(ranks * rows, *shape[1:])
    exchange.all_gather(whole, padded)
    return whole[: shape[0]]


def shard_like(like: Any, local: Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """Return `local` as a shard of a tensor that is cut as `like` is, wherever `local` lives."""
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(mesh or like.device_mesh, like.placements, tensor_meta=meta)
    found: DTensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return found


def stage_shards(module: FSDPModule) -> None:
    """Let `module` gather its weights and reduce its gradients through the memory of the host."""
    module.set_custom_all_gather(_StagedAllGather())  # type: ignore[arg-type]  # the same methods, no public base
    module.set_custom_reduce_scatter(_StagedReduceScatter())  # type: ignore[arg-type]


def _copy_to_host(tensor: Tensor) -> Tensor:
    return _make_host_buffer(tensor.shape, tensor).copy_(tensor)


def _make_host_buffer(shape: Any, like: Tensor) -> Tensor:
    """Return memory of the host for numbers of the type of `like`, pinned if those are on a GPU."""
    return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)


@cache
def _open_exchange(group: Any) -> CardExchange | None:
    """Return the exchange of ranks that are all on one card; `None`: they are not."""
    exchange = CardExchange(CudaMemory(), group)
    return exchange if exchange.is_open else None


@cache
def _make_host_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class _DeviceBuffers:
    """Allocates what `fully_shard` gathers into, and reduces from, on the device."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _StagedAllGather(_DeviceBuffers):
    """Gathers shards. It is done when it returns, also where `fully_shard` would let it run on."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        if (exchange := _open_exchange(group)) is not None:
            exchange.all_gather(output_tensor, input_tensor)
            return
        everything = _make_host_buffer(output_tensor.shape, output_tensor)
        as_bytes = everything.view(-1).view(torch.uint8), _copy_to_host(input_tensor).view(-1).view(torch.uint8)
        dist.all_gather_into_tensor(*as_bytes, group=group)  # bytes, because gloo does not know every type
        output_tensor.copy_(everything)


class _StagedReduceScatter(_DeviceBuffers):
    """Sends every rank its part of the gradients, and adds on the device. It is done when it returns."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if (exchange := _open_exchange(group)) is not None:
            exchange.reduce_scatter(output_tensor, input_tensor)
            return
        sent = _copy_to_host(input_tensor)
        received = _make_host_buffer(input_tensor.shape, input_tensor)
        dist.all_to_all_single(received, sent, group=group)
        parts = received.to(input_tensor.device).view(dist.get_world_size(group), *output_tensor.shape)
        torch.sum(parts, 0, out=output_tensor)
