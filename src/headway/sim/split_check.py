"""Asks whether `headway train` would accept a split of GPUs, by loading the configuration again with these devices."""

from typing import Any

from headway.config import ResolvedConfig, load_config
from headway.errors import ConfigError, ConfigErrors
from headway.sim.planner import SplitCheck

_ACCUMULATION = "actor_train.training_args.gradient_accumulation_steps"
_PLACEMENT = ("use_nodes_ratios", "num_nodes", "hybrid_engine", "async_generation_ratio", "pipeline_depth")


def count_gpus_per_trainer_copy(resolved: ResolvedConfig) -> int:
    """Return the devices that one copy of the trained model needs; the trainer grows in steps of these."""
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def make_split_check(resolved: ResolvedConfig) -> SplitCheck:
    """Return a function that says why `train` would refuse a split of this configuration, or \"\" if it would not."""
    given = {
        key: value
        for key, value in resolved.given().items()
        if key not in _PLACEMENT and not key.endswith("device_mapping")
    }
    if resolved.provenance[_ACCUMULATION].startswith("derived: translated"):
        del given[_ACCUMULATION]  # the mini-batch was given in prompts, and depends on the devices

    def check(train: int, infer: int) -> str:
        devices: dict[str, Any] = {"actor_train.device_mapping": list(range(train))}
        if infer:
            devices["actor_infer.device_mapping"] = list(range(train, train + infer))
            devices["async_generation_ratio"] = max(1.0, resolved.config.async_generation_ratio)
        if _ACCUMULATION not in given:
            devices[_ACCUMULATION] = _find_accumulation(resolved, train)
        try:
            load_config({**given, **devices})
        except (ConfigErrors, ConfigError) as error:
            return str(error).splitlines()[0]
        return ""

    return check


def _find_accumulation(resolved: ResolvedConfig, train: int) -> int | None:
    """Return the micro-batches of an optimizer step whose samples another framework's key fixed; `None` otherwise."""
    if not resolved.provenance[_ACCUMULATION].startswith("derived: translated"):
        return None
    micro = resolved.config.actor_train.training_args.per_device_train_batch_size
    copies = max(1, train // count_gpus_per_trainer_copy(resolved))
    return max(1, resolved.derived.mini_batch_samples // (micro * copies))
