"""Configuration: one tree of typed dataclasses, complete and checked before anything starts.

    resolved = load_config("run.yaml", ["async_generation_ratio=2", "+trainer.n_gpus_per_node=8"])
    resolved.config.actor_train.training_args.learning_rate
    resolved.derived.slots

`load_config` accepts Headway's own keys and those of ROLL and verl, derives what was not given, and raises
`ConfigErrors` with every problem at once. Nothing here evaluates text or imports torch, and plugins are the only code
of the user's that is imported.
"""

from headway.config.config_blocks import (
    CustomEnvConfig,
    EnvManagerConfig,
    ImportanceWeightConfig,
    RatioFilterConfig,
    ReliabilityConfig,
    StageConfig,
    TrainInferCorrectionConfig,
)
from headway.config.config_loading import load_config
from headway.config.resolved_config import DerivedConfig, ResolvedConfig
from headway.config.roles import (
    DataArgs,
    GeneratingArgs,
    OptimizerArgs,
    RewardConfig,
    TrainedModelArgs,
    TrainingDataArgs,
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
    "OptimizerArgs",
    "RatioFilterConfig",
    "ReliabilityConfig",
    "ResolvedConfig",
    "RewardConfig",
    "SimulationConfig",
    "StageConfig",
    "TrainInferCorrectionConfig",
    "TrainedModelArgs",
    "TrainingDataArgs",
    "load_config",
]
