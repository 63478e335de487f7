"""Decide whether versions are adapters alone.

A trainer of one rank with LoRA publishes adapters alone, where our own engine serves them: megabytes travel instead of
whole models, and nothing is rounded by merging. `adapter_bases` gives engines the base that they go on top of.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headway.config import ResolvedConfig
from headway.models.model_shapes import find_model_shape
from headway.placement.server_requirements import uses_external_engines
from headway.registry import ENGINES
from headway.weights.transports import TransportPlan


def plan_adapters(resolved: ResolvedConfig, transport: TransportPlan, ranks: int) -> TransportPlan:
    """Return the transport of adapters alone where the configuration allows it, else `transport` as it is."""
    config, strategy = resolved.config, resolved.derived.strategies.get("actor_infer")
    possible = (
        config.actor_train.model_args.lora_rank is not None
        and config.actor_train.model_args.quantization is None  # engines serve what 4 bits stand for
        and config.weight_transfer.adapters == "auto"
        and resolved.derived.pipeline != "denoising"
        and ranks == 1
        and not uses_external_engines(resolved)
        and strategy in ENGINES.built_in
        and config.actor_infer.model_args.dtype != "fp8"
    )
    return replace(transport, adapters=possible)


def count_version_parameters(resolved: ResolvedConfig, transport: TransportPlan, path: Path) -> int:
    """Return the parameters of a version that is adapters alone; 0 for others, or where the model is not known."""
    args, shape = resolved.config.actor_train.model_args, find_model_shape(path)
    if not transport.adapters or shape is None or args.lora_rank is None:
        return 0
    return shape.count_adapter_parameters(args.lora_rank, frozenset(args.lora_target))
