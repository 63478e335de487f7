"""Which ranks a trainer has, and what of a configuration they can do.

A rank is a process for each device of `actor_train.device_mapping`: a GPU, or on a CPU a share of its cores. Layers are
cut over `tensor_model_parallel_size` of them, sequences over `context_parallel_size`, weights over all others
(`fsdp2_train`); what is left works on different samples. Whatever ranks cannot do is refused here, before anything
starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headway.config import Resolved
from headway.errors import ConfigError
from headway.trainers.sharded.layout import Layout

_SIZES = "actor_train.strategy_args.strategy_config"
_NOT_HERE = {
    "pipeline_model_parallel_size": "layers are not laid out one device after the other in this build",
    "expert_model_parallel_size": "models with experts are not trained in this build",
}


def ranks_of(resolved: Resolved, device: str, cards: Mapping[str, int]) -> int:
    """Processes of the trainer: one for each device that it was given; one where nothing was said, or one is shared."""
    if resolved.config.actor_train.device_mapping is None or (device == "cuda" and not cards):
        return 1
    return len(resolved.derived.devices["actor_train"])


def rank_names(ranks: int) -> list[str]:
    """Of the trainer's processes."""
    return ["trainer"] if ranks == 1 else [f"trainer/{rank}" for rank in range(ranks)]


def layout_of(resolved: Resolved, ranks: int) -> Layout:
    """Who has what. Raises `ConfigError` where the sizes do not divide the ranks."""
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    if ranks == 1:
        return Layout(ranks=1)
    return Layout(ranks=ranks, tensor=sizes.tensor_model_parallel_size, context=sizes.context_parallel_size)


def check_ranks(resolved: Resolved, ranks: int, *, device: str, processes: bool) -> None:
    """Whether so many can do what is asked for. Raises `ConfigError`."""
    config, given = resolved.config, list(resolved.derived.devices["actor_train"])
    for name, problem in _NOT_HERE.items():
        size = getattr(config.actor_train.strategy_args.strategy_config, name)
        if size > 1:
            hint = "1; tensor_model_parallel_size cuts layers, and weights are cut over all ranks anyway"
            raise ConfigError(problem, key=f"{_SIZES}.{name}", value=size, hint=hint)
    if ranks == 1:
        return
    layout = layout_of(resolved, ranks)
    key = "actor_train.device_mapping"
    if not processes:
        problem = f"{ranks} ranks of the trainer are processes"
        raise ConfigError(problem, key="processes", value=False, hint=f"true, or {key}: [{given[0]}]")
    if resolved.derived.pipeline == "generative":
        raise ConfigError("flow models are trained on one device", key=key, value=given, hint=str(given[:1]))
    if config.actor_train.training_args.offload_optimizer and device == "cuda":
        problem = "moments of ranks are not kept in the memory of the host"
        raise ConfigError(problem, key="actor_train.training_args.offload_optimizer", value=True, hint="more ranks")
    if config.actor_train.model_args.lora_rank is not None and layout.tensor > 1:
        problem = "adapters are not cut by columns and rows"
        sized = f"{_SIZES}.tensor_model_parallel_size"
        raise ConfigError(problem, key=sized, value=layout.tensor, hint="1: adapters go with cut weights and sequences")


def check_model(resolved: Resolved, ranks: int, path: Path) -> None:
    """Whether the layers of the model can be shared. Reads its shapes only. Raises `ConfigError`."""
    layout = layout_of(resolved, ranks)
    if layout.tensor == 1:
        return

    from headway.models import architecture
    from headway.trainers.sharded.model import blocks_of
    from headway.trainers.sharded.plan import check_tensor_parallel, plan_of

    backbone = architecture(path)().base_model
    check_tensor_parallel(backbone.config, layout.tensor)
    for layer in blocks_of(backbone):
        plan_of(layer, layout.tensor)
