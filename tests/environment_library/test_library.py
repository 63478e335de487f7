"""Every environment that comes with Headway is found by its name, and says what is wrong with its options."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from headway.environments.environment_registry import (
    BUILT_IN_ENVIRONMENTS,
    check_environment_options,
    find_environment_class,
    list_environment_names,
    make_environment,
)
from headway.environments.text_environment import check_reply, read_traits
from headway.errors import ConfigError
from tests.sandbox.factory import refusal

NAMED_GAMES = {"gem", "gymnasium", "question", "reasoning_gym"}
"""Environments whose first option says which game is played."""
LIGHT = [name for name in ("repair", "shop", "sokoban", "tools") if name != "repair" or not refusal()]


@pytest.mark.parametrize(
    "name", sorted(BUILT_IN_ENVIRONMENTS.keys() - {"gem", "gymnasium", "question", "reasoning_gym"})
)
def test_every_name_leads_to_a_class_whose_options_have_names(name: str) -> None:
    factory = find_environment_class(name)
    assert name in list_environment_names()
    kinds = {parameter.kind for parameter in inspect.signature(factory).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(ConfigError, match="no_such_option"):
        check_environment_options(factory, name, {"no_such_option": 1})


@pytest.mark.parametrize("name", LIGHT)
def test_the_same_object_plays_episode_after_episode(name: str) -> None:
    async def scene() -> list[object]:
        world = make_environment(name)
        traits = read_traits(world)
        assert traits.reusable and traits.instructions and traits.max_steps
        replies: list[object] = []
        for seed in (5, 6, 5):
            opening = world.reset(seed, {})
            replies.append(check_reply(await opening if inspect.isawaitable(opening) else opening, started=False))
            answer = world.step("<tool_call>nonsense")
            replies.append(check_reply(await answer if inspect.isawaitable(answer) else answer, started=True))
        return replies

    replies = asyncio.run(scene())
    assert replies[0:2] == replies[4:6] and replies[0] != replies[2]
    assert not any(getattr(reply, "valid", True) for reply in replies[1::2])
