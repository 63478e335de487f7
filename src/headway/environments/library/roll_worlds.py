"""Worlds by the names that files of ROLL use, as far as they are not environments of ours under the same name.

A name is one of GEM's ids (`math:GSM8K`, `rg:sokoban`, `game:Wordle-v0`), or one that ROLL registers there. Worlds that
need a service or pictures cannot be had; the message names what plays instead.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from headway.environments.library.gem_environment import GemEnvironment
from headway.environments.library.gym_environments import ReasoningGymEnvironment
from headway.environments.library.question_environment import QuestionEnvironment
from headway.environments.library.shop import ShopEnvironment
from headway.errors import ConfigError

_QUESTION_WORLDS = {"roll_math": "math", "roll_qa": "qa", "roll_code": "code"}
_SWE = "env_type: repair mends small repositories in the sandbox; openai_agent trains an agent of your own"
_MISSING_WORLDS = {
    "sokoban_sandbox": ("needs a sandbox service of ROCK", "env_type: sokoban is the same game"),
    "sokoban_mcp": ("needs an MCP server that plays", "env_type: sokoban is the same game; tools has {name: mcp}"),
    "rock_tb_native_env": ("needs sandboxes of ROCK", _SWE),
    "swe_env": ("needs sandboxes of ROCK", _SWE),
    "cli": ("needs a service of its own", _SWE),
    "openreward_env": ("needs a service of OpenReward", "env_type: verifiers, tools or openai_agent"),
    "atropos_env": ("needs a server of Atropos", "env_type: verifiers or openai_agent"),
    "deepeyes": ("shows pictures, which are not offered here", "env_type: roll_qa asks questions in text"),
    "gem_search": ("needs a search server", "env_type: tools with {name: search, files: […]}"),
}
"""Worlds that cannot be had: why, and what there is instead."""


def find_world(name: str) -> Callable[..., Any] | None:
    """Return what makes a world of that name; `None` for names that are no worlds of ROLL. Raises `ConfigError`."""
    if name in _MISSING_WORLDS:
        problem, instead = _MISSING_WORLDS[name]
        raise ConfigError(f"{problem}, so it cannot be played here", key="env_type", value=name, hint=instead)
    if name in _QUESTION_WORLDS:
        return partial(QuestionEnvironment, _QUESTION_WORLDS[name])
    kind, _, rest = name.partition(":")
    if not rest or _is_users_module(kind):
        return None
    if kind == "rg":
        return partial(make_puzzle, rest)
    if kind == "game":
        return partial(GemEnvironment, name)
    return partial(QuestionEnvironment, "math" if kind == "eval" else kind)


def _is_users_module(name: str) -> bool:
    """Return whether `name:Class` may be a class of the user's: a module that is not of the standard library."""
    return name not in sys.stdlib_module_names and importlib.util.find_spec(name) is not None


def make_puzzle(task: str, *, size: int = 500, seed: int = 42, **options: Any) -> ReasoningGymEnvironment:
    """Make a puzzle of reasoning-gym whose answer stands in a box. `size` and `seed` change nothing: each seed of the
    run makes a puzzle of its own."""
    return ReasoningGymEnvironment(task, boxed=True, **options)


def make_webshop(
    *, observation_mode: str = "text", max_steps: int = 15, products: int = 1000, num_products: int | None = None
) -> ShopEnvironment:
    """Make Headway's own shop, which has WebShop's pages, actions and reward over an invented catalogue."""
    if observation_mode not in ("text", "text_rich"):
        raise ConfigError("only text can be read", key="observation_mode", value=observation_mode, hint="text")
    return ShopEnvironment(products=num_products or products, max_steps=max_steps)
