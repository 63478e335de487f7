"""Configuration: one tree of typed dataclasses, complete and checked before anything starts.

    resolved = load("run.yaml", ["async_generation_ratio=2", "+trainer.n_gpus_per_node=8"])
    resolved.config.actor_train.training_args.learning_rate
    resolved.derived.slots

`load_config` accepts both dialects users have, derives what was not said, and raises `ConfigErrors` with every problem at
once. Nothing here reads the environment, evaluates text or imports torch.
"""

from headway.config.config_blocks import (
    CustomEnvConfig,
    EnvManagerConfig,
    ImportanceWeightConfig,
    RatioFilterConfig,
    ReliabilityConfig,
    TrainInferCorrectionConfig,
)
from headway.config.config_loading import load_config
from headway.config.resolved_config import DerivedConfig, ResolvedConfig
from headway.config.roles import (
    DataArgs,
    GeneratingArgs,
    ModelArgs,
    RewardConfig,
    RoleConfig,
    StrategyArgs,
    StrategyConfig,
    TrainingArgs,
    ValidationConfig,
)
from headway.config.schema import Config
from headway.config.simulation_config import SimulationConfig
from headway.errors import ConfigError, ConfigErrors

__all__ = [
    "Config",
    "ConfigError",
    "ConfigErrors",
    "CustomEnvConfig",
    "DataArgs",
    "DerivedConfig",
    "EnvManagerConfig",
    "GeneratingArgs",
    "ImportanceWeightConfig",
    "ModelArgs",
    "RatioFilterConfig",
    "ReliabilityConfig",
    "ResolvedConfig",
    "RewardConfig",
    "RoleConfig",
    "SimulationConfig",
    "StrategyArgs",
    "StrategyConfig",
    "TrainInferCorrectionConfig",
    "TrainingArgs",
    "ValidationConfig",
    "load_config",
]
