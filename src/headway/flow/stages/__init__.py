"""The stages of the line. Importing this package registers them all under their roles."""

from headway.flow.stages.dataloader_stage import DataloaderStage
from headway.flow.stages.generate_stage import GenerateStage
from headway.flow.stages.param_update_stage import ParamUpdateStage
from headway.flow.stages.reward_stage import RewardStage
from headway.flow.stages.rollout_stage import RolloutStage
from headway.flow.stages.scoring_stages import CriticStage, LogpStage, RefLogpStage
from headway.flow.stages.train_stage import TrainStage

__all__ = [
    "CriticStage",
    "DataloaderStage",
    "GenerateStage",
    "LogpStage",
    "ParamUpdateStage",
    "RefLogpStage",
    "RewardStage",
    "RolloutStage",
    "TrainStage",
]
