"""Small agentic runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runs.factory import Run, Runs

SEED_FILE = Path(__file__).parents[1] / "data" / "configs" / "frozen_lake_async.yaml"
SIZES: dict[str, Any] = {
    "reward_pretrain": "null",
    "rollout_batch_size": 4,
    "val_batch_size": 3,
    "sequence_length": 450,
    "max_steps": 2,
    "eval_steps": 2,
    "actor_train.device_mapping": "null",
    "actor_infer.device_mapping": "null",
    "actor_train.training_args.learning_rate": 1e-3,
    "actor_train.training_args.gradient_accumulation_steps": 2,
    "actor_train.model_args.disable_gradient_checkpointing": True,
    "actor_infer.generating_args.max_new_tokens": 6,
}
"""What one machine makes of the seed's sizes."""
LAKE: dict[str, Any] = {
    "train_env_manager.tags": "[lake]",
    "train_env_manager.group_size": 2,
    "train_env_manager.format_penalty": -0.1,
    "custom_envs.lake.env_type": "frozen_lake",
    "custom_envs.lake.max_steps": 3,
    "custom_envs.lake.env_config.is_slippery": False,
    "custom_envs.lake.agent_system_template": "Go.",
}
"""The environment, which the seed's own repository keeps in another file."""
WORLDS = "tests.environments.sample_environments"


def lake(runs: Runs, directory: Path, *words: str, **changed: Any) -> Run:
    """`headway train` of the seed's file in small."""
    return runs.start(directory, "train", str(SEED_FILE), *overrides(runs, directory, **{**LAKE, **changed}), *words)


def world(runs: Runs, directory: Path, name: str, **changed: Any) -> Run:
    """The same run in an environment of `tests.environments.sample_environments`."""
    own = {
        "train_env_manager.tags": "[lake]",
        "train_env_manager.group_size": 2,
        "custom_envs.lake.env_type": f"{WORLDS}:{name}",
        "custom_envs.lake.max_steps": 2,
    }
    return runs.start(directory, "train", str(SEED_FILE), *overrides(runs, directory, **{**own, **changed}))


def overrides(runs: Runs, directory: Path, **changed: Any) -> list[str]:
    """As words of the command line; `__` stands for a dot."""
    options = {
        **SIZES,
        "pretrain": str(runs.model),
        "output_dir": str(directory),
        "processes": False,
        "filter_zero_variance": False,
        "track_with": "[]",
        **{key.replace("__", "."): value for key, value in changed.items()},
    }
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]
