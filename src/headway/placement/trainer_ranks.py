"""The ranks of a trainer: how many there are, and how they share a step.

Weights, gradients and moments are cut over all ranks (FSDP2), so a model fits on many devices without any parallel
size. Tensor and context sizes are used where they divide the ranks. Pipeline and expert sizes, and sizes that do not
divide, are asked for so that a model fits; they are taken as that wish, and one line says so.
"""

from __future__ import annotations

from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.trainers.sharded.rank_layout import RankLayout

_DEVICES_KEY = "actor_train.device_mapping"
_SIZES_KEY = "actor_train.strategy_args.strategy_config"
_COST = "each rank gathers the weights of a layer before it computes it, twice in a micro-batch"


def count_trainer_ranks(resolved: ResolvedConfig, device: str, devices: tuple[int, ...], *, separate: bool) -> int:
    """Return the number of trainer processes on `devices`. `separate`: each can have a process of its own."""
    config = resolved.config
    if not separate:
        return 1
    if device == "cpu" and config.actor_train.device_mapping is None and config.devices.count is None:
        sizes = config.actor_train.strategy_args.strategy_config
        return sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return len(devices)


def make_rank_layout(resolved: ResolvedConfig, ranks: int) -> RankLayout:
    """Return how the ranks share a step. Sizes that do not divide their number are left out, the larger one first.

    Ranks of a denoising model share neither layers nor pictures, and layers with adapters are not shared.
    """
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    if resolved.derived.pipeline == "denoising":
        return RankLayout(ranks=ranks)
    adapted = resolved.config.actor_train.model_args.lora_rank is not None
    tensor, context = 1 if adapted else sizes.tensor_model_parallel_size, sizes.context_parallel_size
    choices = (
        [(tensor, context), (1, context), (tensor, 1)]
        if tensor >= context
        else [(tensor, context), (tensor, 1), (1, context)]
    )
    for one_tensor, one_context in choices:
        if ranks % (one_tensor * one_context) == 0:
            return RankLayout(ranks=ranks, tensor=one_tensor, context=one_context)
    return RankLayout(ranks=ranks)


def plan_rank_layout(resolved: ResolvedConfig, ranks: int, *, device: str, processes: bool) -> RankLayout:
    """Return how the ranks share a step. Raises `ConfigError` for anything in the configuration that they cannot do."""
    config = resolved.config
    layout = make_rank_layout(resolved, ranks)
    if ranks == 1:
        return layout
    key, single = _find_ranks_key(resolved)
    if not processes:
        problem = f"{ranks} ranks of the trainer are processes"
        raise ConfigError(problem, key="processes", value=False, hint=f"true, or {key}: {single}")
    args, key = config.actor_train.training_args, "actor_train.training_args"
    if args.optim == "adamw_8bit":
        problem = f"moments of {ranks} ranks are cut over them, and not in 8 bits"
        raise ConfigError(
            problem, key=f"{key}.optim", value=args.optim, hint="adamw; offload_optimizer works with both"
        )
    if config.actor_train.model_args.quantization is not None:
        problem, wrong = f"weights in 4 bits are not cut over {ranks} ranks", config.actor_train.model_args.quantization
        raise ConfigError(problem, key="actor_train.model_args.quantization", value=wrong, hint="null, or one rank")
    if args.stochastic_rounding:
        problem = f"{ranks} ranks keep their weights in fp32"
        raise ConfigError(problem, key=f"{key}.stochastic_rounding", value=True, hint="false")
    return layout


def explain_rank_layout(resolved: ResolvedConfig, layout: RankLayout) -> list[str]:
    """Return one line on the parallel sizes that were given and are not used as such; nothing where there is none."""
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    given = {
        "tensor_model_parallel_size": (sizes.tensor_model_parallel_size, layout.tensor),
        "context_parallel_size": (sizes.context_parallel_size, layout.context),
        "pipeline_model_parallel_size": (sizes.pipeline_model_parallel_size, 1),
        "expert_model_parallel_size": (sizes.expert_model_parallel_size, 1),
    }
    unused = [f"{name} = {size}" for name, (size, used) in given.items() if size > 1 and size != used]
    if not unused:
        return []
    instead = "one process trains the whole model"
    if layout.ranks > 1:
        instead = f"FSDP2 cuts weights, gradients and moments over all {layout.ranks} ranks; {_COST}"
    return [f"actor_train: {', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect here: {instead}"]


def _find_ranks_key(resolved: ResolvedConfig) -> tuple[str, str]:
    """Return the key that asks for several ranks, and the value that would make it one rank."""
    mapping = resolved.config.actor_train.device_mapping
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        if mapping is None and getattr(sizes, name) > 1:
            return f"{_SIZES_KEY}.{name}", "1"
    return _DEVICES_KEY, str([resolved.derived.devices["actor_train"][0]])
