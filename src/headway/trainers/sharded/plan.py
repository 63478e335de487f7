"""Which weights of a decoder's layers are cut by columns and which by rows, for ranks that share layers.

Queries, keys, values and the way up are cut by columns (heads stay whole), what follows them by rows, and the sum over
ranks is what the next layer sees. Embeddings, norms and the head are not cut: every rank of the mesh has them whole.
A layer that has a matrix under any other name is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from headway.errors import ConfigError

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
_KEY = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size"


def split_layers(layers: Sequence[nn.Module], config: Any, mesh: DeviceMesh) -> None:
    """Cut every layer over `mesh`. Raises `ConfigError` where a layer cannot be cut."""
    check_tensor_parallel(config, mesh.size())
    for layer in layers:
        parallelize_module(layer, mesh, plan_of(layer, mesh.size()))


def plan_of(layer: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """How each matrix of a layer is cut. Raises `ConfigError` where it is not known of one."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in COLUMNS:
            plan[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and last in ROWS:
            plan[name] = RowwiseParallel()
    for name, one in layer.named_parameters():
        if one.ndim >= 2 and name.rpartition(".")[0] not in plan:
            problem = f"{type(layer).__name__}.{name} is neither cut by columns nor by rows"
            raise ConfigError(problem, key=_KEY, value=size, hint="1")
    return plan


def check_tensor_parallel(config: Any, size: int) -> None:
    """Whether heads and the inner width come out even. Raises `ConfigError`."""
    heads = getattr(config, "num_attention_heads", 0)
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", heads),
        "intermediate_size": getattr(config, "intermediate_size", 0),
    }
    for name, count in counts.items():
        if not count or count % size:
            problem = f"{name} of the model is {count}, which {size} ranks cannot share"
            raise ConfigError(problem, key=_KEY, value=size, hint="a divisor of all of them, or 1")
