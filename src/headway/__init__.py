"""Headway: asynchronous RL post-training. Rollout runs ahead of training by a bounded distance.

    import headway

    headway.train("run.yaml", {"max_steps": 40}, rewards={"mine": closeness})

What commands do: `train`, `train_async` (in a notebook), `evaluate`, `simulate`, `plan`, `serve`, `load_config`.
Back ends for a scheduler of your own: `open_run`.
Decorators for code of your own: `register_loss`, `register_advantage`, `register_policy`, `register_stage`,
`register_reward`, `register_environment`, `register_engine`.

`help(headway.api)` explains each. That module is imported when it is first used, so that child processes, which import
single modules, start fast.
"""

from importlib import import_module
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
    if name != "api" and name not in __all__:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    api = import_module("headway.api")
    return api if name == "api" else getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "api"})
