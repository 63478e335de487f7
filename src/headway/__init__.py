"""Headway: asynchronous RL post-training. Rollout runs ahead of training by a bounded distance.

    import headway

    headway.train("run.yaml", {"max_steps": 40}, rewards={"mine": closeness})

`headway.api` explains everything that is offered here. It is imported when it is first used, so that child processes,
which import single modules, start fast.
"""

from typing import TYPE_CHECKING, Any

from headway.version import VERSION

if TYPE_CHECKING:
    from headway.api import (
        evaluate,
        load_config,
        open_run,
        plan,
        register_advantage,
        register_engine,
        register_environment,
        register_loss,
        register_policy,
        register_reward,
        register_stage,
        serve,
        simulate,
        train,
        train_async,
    )

__all__ = [
    "__version__",
    "evaluate",
    "load_config",
    "open_run",
    "plan",
    "register_advantage",
    "register_engine",
    "register_environment",
    "register_loss",
    "register_policy",
    "register_reward",
    "register_stage",
    "serve",
    "simulate",
    "train",
    "train_async",
]
__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    from headway import api

    return getattr(api, name)
