"""The stages of the line. Importing this package registers them all under their roles."""

from headway.flow.stages.dataloader import DataloaderStage
from headway.flow.stages.generate import GenerateStage
from headway.flow.stages.param_update import ParamUpdateStage
from headway.flow.stages.reward import RewardStage
from headway.flow.stages.rollout import RolloutStage
from headway.flow.stages.scoring import CriticStage, LogpStage, RefLogpStage
from headway.flow.stages.train import TrainStage

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
