"""FrozenLake, gymnasium's others, reasoning-gym, and finding environments by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headway.api import register_environment
from headway.environments.environment_registry import (
    find_environment_class,
    list_environment_names,
    make_environment,
)
from headway.environments.text_environment import EnvironmentTraits, Reply, check_reply, read_traits
from headway.errors import ConfigError, EnvironmentFailed

FIXED = ["SFFF", "FHFH", "FFFH", "HFFG"]


def lake(**options: Any) -> Any:
    pytest.importorskip("gymnasium")
    return make_environment("frozen_lake", **{"is_slippery": False, **options})


def test_frozen_lake_is_walked_to_the_goal_and_progress_depends_on_where_one_is_alone() -> None:
    world = lake(progress=0.6)
    assert world.reset(0, {"map": FIXED}) == "P___\n_O_O\n___O\nO__G"
    there = world.step("Down").reward
    assert there == pytest.approx(0.1) and world.step("up").reward == pytest.approx(-there)
    replies = [world.step(move) for move in ("Down", "Down", "I go RIGHT.", "right", "down", "right")]
    assert sum(reply.reward for reply in replies) == pytest.approx(1.6)
    assert replies[-1] == Reply("____\n_O_O\n___O\nO__√", pytest.approx(1.1), True, True, True, {"effective": True})


def test_frozen_lake_ends_in_a_hole_and_counts_what_is_no_move() -> None:
    world = lake()
    world.reset(0, {"map": FIXED})
    for nonsense in ("", "left or right?", "swim"):
        assert world.step(nonsense) == Reply(
            "Answer with one of Left, Down, Right, Up.\nP___\n_O_O\n___O\nO__G", valid=False
        )
    assert world.step("up").info == {"effective": False}
    world.step("right")
    fallen = world.step("down")
    assert (fallen.done, fallen.success, fallen.reward, fallen.text) == (True, False, 0.0, "____\n_X_O\n___O\nO__G")


def test_frozen_lake_near_by_says_what_is_around() -> None:
    world = lake(view="near")
    assert (
        world.reset(0, {"map": FIXED})
        == "The goal is Down and Right. You can go Down or Right. Which direction? One word."
    )
    world.step("right")
    assert world.step("right").text == (
        "The goal is Down and Right. You can go Left or Down or Right. Which direction? One word."
    )


def test_maps_come_from_the_seed_and_can_be_crossed() -> None:
    world = lake(size=5, p=0.6)
    first = [world.reset(seed, {}) for seed in range(12)]
    assert first == [world.reset(seed, {}) for seed in range(12)] and len(set(first)) > 10
    fixed = lake(size=5, map_seed=3)
    assert len({fixed.reset(seed, {}) for seed in range(4)}) == 1
    with pytest.raises(ConfigError, match="cannot be reached"):
        world.reset(0, {"map": ["SH", "HG"]})


def test_start_and_goal_may_be_anywhere_and_every_move_is_the_right_one_equally_often() -> None:
    world, moves, starts = lake(view="near", anywhere=True), Counter[str](), set[str]()
    for seed in range(200):
        text = world.reset(seed, {})
        assert text == world.reset(seed, {}), "the seed says everything"
        starts.add(text)
        moves.update(text.partition(".")[0].removeprefix("The goal is ").split(" and "))
    assert set(moves) == {"Left", "Down", "Right", "Up"} and max(moves.values()) < 1.5 * min(moves.values()), moves
    assert len(starts) > 20
    corners = {lake(view="near").reset(seed, {}).partition(".")[0] for seed in range(20)}
    assert corners == {"The goal is Down and Right"}


def test_frozen_lake_speaks_the_words_of_its_options() -> None:
    world = lake(
        action_lookup={1: "W", 2: "S", 3: "E", 4: "N"},
        action_pattern=r"<answer>(.*?)</answer>",
        grid_lookup={0: "@", 1: ".", 2: "~", 3: "*", 4: "!", 5: "+"},
        env_instruction="Swim not.",
    )
    assert world.instructions == "Swim not." and world.reset(0, {"map": FIXED}) == "@...\n.~.~\n...~\n~..*"
    assert not world.step("S").valid and world.step("north? no: <answer> S </answer>").text.startswith("....\n@~.~")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"size": 1}, "size = 1: must be from 2 to 32"),
        ({"p": 0}, "must lie in"),
        ({"view": "map"}, "one of grid, near"),
        ({"action_lookup": ["a", "A", "b", "c"]}, "4 different words"),
        ({"is_slipery": True}, "did you mean 'is_slippery'?"),
    ],
)
def test_a_lake_that_cannot_be_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("?", r"\?").replace("(", r"\(")):
        lake(**options)


def test_toy_text_is_played_by_words_and_one_sees_where_one_stands() -> None:
    pytest.importorskip("gymnasium")
    world: Any = make_environment("gymnasium", id="FrozenLake-v1", is_slippery=False)
    assert world.reset(0, {}) == "[S]FFF\nFHFH\nFFFH\nHFFG" and world.max_steps == 100
    assert world.step("go down").text == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert not world.step("dive").valid
    jack: Any = make_environment("gymnasium", id="Blackjack-v1")
    jack.reset(1, {})
    end = jack.step("Stick")
    assert end.done and end.success is (end.reward > 0)
    for name, problem in (("CartPole-v1", "cannot be shown as text"), ("Pendulum-v1", "cannot act by words")):
        with pytest.raises(ConfigError, match=problem):
            make_environment("gymnasium", id=name)
    with pytest.raises(ConfigError, match="gymnasium does not make it"):
        make_environment("gymnasium", id="FrozenLak-v1")


def test_puzzles_are_asked_until_the_tries_are_used_up() -> None:
    pytest.importorskip("reasoning_gym")
    world: Any = make_environment("reasoning_gym", task="chain_sum", tries=2, max_terms=2)
    question = world.reset(5, {})
    assert question == world.reset(5, {}) != world.reset(6, {})
    answer = world._entry["answer"]
    assert world.step("no idea").reward < 0.1
    right = world.step(f" {answer} ")
    assert right.done and right.success and world.max_steps == 2
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        make_environment("reasoning_gym", task="chainsum")


def test_environments_are_found_by_name_module_and_file(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("class Mine:\n    def reset(self, seed, data): return 'x'\n    def step(self, action): ...\n")
    assert type(make_environment(f"{own}:Mine")).__name__ == "Mine"
    assert make_environment("tests.environments.sample_environments:Guess", most=3)
    assert {"frozen_lake", "gymnasium", "reasoning_gym"} <= set(list_environment_names())

    @register_environment("registered")
    class Registered:
        def reset(self, seed: int, data: object) -> str:
            return ""

        def step(self, action: str) -> Reply:
            return Reply()

    assert isinstance(make_environment("registered"), Registered)
    with pytest.raises(ConfigError, match="is a built-in environment"):
        register_environment("frozen_lake")(Registered)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("frozen_lac", "did you mean 'frozen_lake'"),
        ("no.such.module:X", "cannot be imported: ModuleNotFoundError"),
        ("missing.py:X", "no such file"),
        ("tests.environments.sample_environments:Gues", "did you mean 'Guess'"),
        ("tests.environments.sample_environments:Reply", "made a Reply without reset and step"),
        ("tests.environments.sample_environments:__name__", "not a class"),
    ],
)
def test_what_is_no_environment_is_refused_with_a_hint(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_environment(name)
    with pytest.raises(ConfigError, match=r"options of .*: most, base"):
        make_environment("tests.environments.sample_environments:Guess", mst=3)
    assert find_environment_class("tests.environments.sample_environments:Guess").__name__ == "Guess"


def test_traits_and_replies_of_the_wrong_kind_are_refused() -> None:
    assert read_traits(object()) == EnvironmentTraits()
    assert read_traits(type("E", (), {"stop": "x", "max_steps": 2})()) == EnvironmentTraits(stop=("x",), max_steps=2)
    with pytest.raises(EnvironmentFailed, match="attributes of the wrong kind"):
        read_traits(type("E", (), {"max_steps": "many"})())
    assert check_reply("hello", started=False) == Reply("hello")
    for wrong in (None, "hello", Reply(text=3), Reply(reward="1"), Reply(reward=float("nan")), Reply(info=[])):  # type: ignore[arg-type]
        with pytest.raises(EnvironmentFailed, match="step"):
            check_reply(wrong, started=True)
