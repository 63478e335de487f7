"""The stages of the pipeline. Importing this package registers all of them under their roles.

The state machines of the async-RL pipeline of verl are these classes:

| state machine | stage here |
|---|---|
| `DataloaderStateMachine` | `DataloaderStage` |
| `GenerateStateMachine` | `GenerateStage`; `RolloutLoop` and `EnvironmentAgent` do the work |
| `RolloutStateMachine` | `RolloutStage` |
| `LogPStateMachine` | `LogpStage` |
| `RefLogPStateMachine` | `RefLogpStage` |
| `RewardStateMachine` | `RewardStage` |
| `TrainStateMachine` | `TrainStage` |
| `ParamUpdateStateMachine` | `ParamUpdateStage` |

`CriticStage` stands before `TrainStage` where an estimator needs values.
"""

# ruff: noqa: F401
from headway.flow.stages.dataloader_stage import DataloaderStage
from headway.flow.stages.generate_stage import GenerateStage
from headway.flow.stages.param_update_stage import ParamUpdateStage
from headway.flow.stages.reward_stage import RewardStage
from headway.flow.stages.rollout_stage import RolloutStage
from headway.flow.stages.scoring_stages import CriticStage, LogpStage, RefLogpStage
from headway.flow.stages.train_stage import TrainStage
