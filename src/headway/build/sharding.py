"""Which ranks a trainer has, and what of a configuration they can do.

A rank is a process for each device of `actor_train.device_mapping`: a GPU, or on a CPU a share of its cores. Layers are
cut over `tensor_model_parallel_size` of them, sequences over `context_parallel_size`, weights over all others
(`fsdp2_train`); what is left works on different samples. On a CPU, sizes without a `device_mapping` make as many ranks
as they need. Whatever ranks cannot do, and sizes that one process would have to ignore, are refused here, before
anything starts.
"""

from __future__ import annotations

from pathlib import Path

from headway.config import Resolved
from headway.errors import ConfigError
from headway.trainers.sharded.layout import Layout

_SIZES = "actor_train.strategy_args.strategy_config"
_SHARED = ("tensor_model_parallel_size", "context_parallel_size")
_DEVICES = "actor_train.device_mapping"
_NOT_HERE = {
    "pipeline_model_parallel_size": "layers are not laid out one device after the other in this build",
    "expert_model_parallel_size": "models with experts are not trained in this build",
}


def ranks_of(resolved: Resolved, device: str, *, apart: bool) -> int:
    """Processes of the trainer. `apart`: each of its devices can have one of its own."""
    if not apart:
        return 1
    if device == "cpu" and resolved.config.actor_train.device_mapping is None:
        sizes = resolved.config.actor_train.strategy_args.strategy_config
        return sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return len(resolved.derived.devices["actor_train"])


def rank_names(ranks: int) -> list[str]:
    """Of the trainer's processes."""
    return ["trainer"] if ranks == 1 else [f"trainer/{rank}" for rank in range(ranks)]


def rank_devices(resolved: Resolved, ranks: int) -> dict[str, tuple[int, ...]]:
    """The devices of each of the trainer's processes: equal shares, in order."""
    devices = resolved.derived.devices["actor_train"]
    each = len(devices) // ranks
    return {name: tuple(devices[rank * each : (rank + 1) * each]) for rank, name in enumerate(rank_names(ranks))}


def layout_of(resolved: Resolved, ranks: int) -> Layout:
    """Who has what. Raises `ConfigError` where the sizes do not divide the ranks."""
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    if ranks == 1:
        return Layout(ranks=1)
    return Layout(ranks=ranks, tensor=sizes.tensor_model_parallel_size, context=sizes.context_parallel_size)


def check_ranks(resolved: Resolved, ranks: int, *, device: str, processes: bool) -> Layout:
    """How so many share what is asked for. Raises `ConfigError` where they cannot."""
    config = resolved.config
    for name, problem in _NOT_HERE.items():
        size = getattr(config.actor_train.strategy_args.strategy_config, name)
        if size > 1:
            hint = "1; tensor_model_parallel_size cuts layers, and weights are cut over all ranks anyway"
            raise ConfigError(problem, key=f"{_SIZES}.{name}", value=size, hint=hint)
    if ranks == 1:
        _check_alone(resolved)
        return Layout(ranks=1)
    layout, (key, value, one) = layout_of(resolved, ranks), _reason(resolved)
    if not processes:
        problem = f"{ranks} ranks of the trainer are processes"
        raise ConfigError(problem, key="processes", value=False, hint=f"true, or {key}: {one}")
    if resolved.derived.pipeline == "generative":
        raise ConfigError("flow models are trained on one device", key=key, value=value, hint=one)
    if config.actor_train.training_args.offload_optimizer and device == "cuda":
        problem = "moments of ranks are not kept in the memory of the host"
        raise ConfigError(problem, key="actor_train.training_args.offload_optimizer", value=True, hint="more ranks")
    if config.actor_train.model_args.lora_rank is not None and layout.tensor > 1:
        problem = "adapters are not cut by columns and rows"
        sized = f"{_SIZES}.{_SHARED[0]}"
        raise ConfigError(problem, key=sized, value=layout.tensor, hint="1: adapters go with cut weights and sequences")
    return layout


def _check_alone(resolved: Resolved) -> None:
    """One process shares nothing with anybody."""
    for name in _SHARED:
        size = getattr(resolved.config.actor_train.strategy_args.strategy_config, name)
        if size > 1:
            problem = f"the trainer would be one process here, and {size} ranks were to share its work"
            hint = (
                f"1, or {_DEVICES} with GPUs of this machine (a multiple of {size}) that actor_infer does not have, "
                "and processes left out"
            )
            raise ConfigError(problem, key=f"{_SIZES}.{name}", value=size, hint=hint)


def _reason(resolved: Resolved) -> tuple[str, object, str]:
    """Why there are several: the key, its value, and what makes it one."""
    given, sizes = resolved.config.actor_train.device_mapping, resolved.config.actor_train.strategy_args.strategy_config
    name = next((name for name in _SHARED if getattr(sizes, name) > 1), "")
    if given is None and name:
        return f"{_SIZES}.{name}", getattr(sizes, name), "1"
    return _DEVICES, None if given is None else list(given), str([resolved.derived.devices["actor_train"][0]])


def check_model(layout: Layout, path: Path) -> None:
    """Whether the layers of the model can be shared. Reads its shapes only. Raises `ConfigError`."""
    if layout.tensor == 1:
        return

    from headway.models import architecture
    from headway.trainers.sharded.model import blocks_of
    from headway.trainers.sharded.plan import check_tensor_parallel, plan_of

    backbone = architecture(path)().base_model
    check_tensor_parallel(backbone.config, layout.tensor)
    for layer in blocks_of(backbone):
        plan_of(layer, layout.tensor)
