"""Text worlds of others: TextWorldExpress and ScienceWorld for real, ALFWorld against a stand-in for its library."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.environments.library import text_games
from headway.environments.library.text_games import ALFWorld, ScienceWorld, TextWorldExpress
from headway.errors import ConfigError, EnvironmentFailed

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java here")


def children() -> set[int]:
    """Java processes that we have started and that are still there."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition(") ")
        except OSError:
            continue
        if name.endswith("(java") and rest.split()[0] != "Z" and int(rest.split()[1]) == os.getpid():
            found.add(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def coins() -> Iterator[TextWorldExpress]:
    pytest.importorskip("textworld_express")
    before = children()
    world = TextWorldExpress(game="coin", game_params="numLocations=3,includeDoors=0", max_steps=20)
    assert len(children() - before) == 1
    yield world
    world.close()
    world.close()
    assert children() == before, "its process is gone"


def find_gold_path(world: TextWorldExpress, seed: int) -> list[str]:
    """Start a game and return actions that solve it."""
    names = {"gameFold": world._fold, "gameName": world._game, "gameParams": world._params}
    game_seed = world._find_game_seed(world._game, world._params, seed)
    world._world.reset(seed=game_seed, **names, generateGoldPath=True)
    return list(world._world.getGoldActionSequence())


@needs_java
def test_the_gold_path_earns_one(coins: TextWorldExpress) -> None:
    for seed in (0, 1005):
        path = find_gold_path(coins, seed)
        opening = coins.reset(seed, {})
        assert opening.startswith("Task: ") and "Possible actions: " in opening
        replies = [coins.step(f"<answer>{action}</answer>") for action in path]
        assert replies[-1].done and replies[-1].success and sum(reply.reward for reply in replies) == 1.0
        assert all(reply.valid for reply in replies) and not any(reply.done for reply in replies[:-1])


@needs_java
def test_equal_seeds_begin_equally_and_others_do_not(coins: TextWorldExpress) -> None:
    assert coins.reset(3, {}) == coins.reset(1003, {}) != coins.reset(4, {})
    assert "Simon" in coins.reset(0, {"game": "simonsays", "game_params": ""})


@needs_java
def test_idling_and_nonsense_earn_nothing_until_the_steps_are_used_up(coins: TextWorldExpress) -> None:
    coins.reset(0, {})
    nonsense = coins.step("fly to the moon\nthen look around")
    assert not nonsense.valid and nonsense.reward == 0.0 and not nonsense.done
    assert not coins.step("").valid
    replies = [coins.step("look around") for _ in range(18)]
    assert [reply.done for reply in replies] == [False] * 17 + [True]
    assert replies[-1].success is False and not any(reply.reward for reply in replies)


@needs_java
def test_parameters_that_the_game_does_not_have_lose_the_episode(coins: TextWorldExpress) -> None:
    with pytest.raises(EnvironmentFailed, match="no coin"):
        coins.reset(0, {"game_params": "numLocations=900"})


@needs_java
def test_java_does_not_outlive_a_killed_run() -> None:
    pytest.importorskip("textworld_express")
    code = (
        "from headway.environments.library.text_games import TextWorldExpress as T\n"
        "import signal; w = T(); print(w._world._gateway.java_process.pid, flush=True); signal.pause()"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    watched = os.pidfd_open(pid)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert select.select([watched], [], [], 20)[0], "the process has ended"
    os.close(watched)


def test_a_process_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_games, "_JAVA_EXIT_TIMEOUT_S", 0.1)
    deaf = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    text_games.close_java_world(SimpleNamespace(_gateway=SimpleNamespace(java_process=deaf), close=lambda: None))
    assert deaf.returncode == -signal.SIGKILL


def test_worlds_that_do_not_exist_are_refused_before_anything_starts() -> None:
    for options in ({"game": "chess"}, {"fold": "all"}, {"max_steps": 0}):
        with pytest.raises(ConfigError):
            TextWorldExpress(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fold"):
        ScienceWorld(fold="all")
    with pytest.raises(ConfigError, match="split"):
        ALFWorld(split="all")


def test_a_missing_library_or_java_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="needs Java"):
        TextWorldExpress()
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/java")
    for name in ("textworld_express", "scienceworld", "textworld"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"textworld-express"):
        TextWorldExpress()
    with pytest.raises(ConfigError, match=r"scienceworld>="):
        ScienceWorld()
    with pytest.raises(ConfigError, match=r"alfworld>="):
        ALFWorld()


@needs_java
def test_scienceworld_scores_what_is_done() -> None:
    pytest.importorskip("scienceworld")
    before = children()
    with pytest.raises(ConfigError, match="no such task"):
        ScienceWorld(task="fly-to-the-moon")
    world = ScienceWorld(task="find-living-thing", max_steps=8)
    try:
        opening = world.reset(1, {})
        assert "living thing" in opening
        assert not world.step("fly").valid
        moved = world.step("<answer>teleport to outside</answer>")
        assert moved.valid and moved.reward > 0.0 and not moved.done
        assert world.step("focus on air").done, "the wrong thing ends the task"
        assert world.reset(1, {}).splitlines()[:3] == opening.splitlines()[:3]
        assert world.step("look around").info["variation"] == 1
    finally:
        world.close()
    assert children() == before


class StandIn:
    """A game of ALFWorld as TextWorld plays it: states are mappings, `step` gives state, score and done."""

    def __init__(self, path: str) -> None:
        self.path, self.closed = path, False

    def state(self, feedback: str, won: bool = False) -> dict[str, Any]:
        commands = ["go to shelf 1", "look", "take apple 1 from shelf 1"]
        return {"feedback": f"{self.path}: {feedback}", "admissible_commands": commands, "won": won}

    def reset(self) -> dict[str, Any]:
        return self.state("Your task is to: take the apple.")

    def step(self, command: str) -> tuple[dict[str, Any], float, bool]:
        won = command == "take apple 1 from shelf 1"
        return self.state("You won!" if won else "Nothing happens.", won), float(won), won

    def close(self) -> None:
        self.closed = True


def test_alfworld_plays_the_games_below_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train/a", "train/b", "train/c-unsolvable", "train/pick-movable-d", "valid_seen/e"):
        (tmp_path / "json_2.1.1" / name).mkdir(parents=True)
        content = json.dumps({"solvable": "unsolvable" not in name})
        (tmp_path / "json_2.1.1" / name / "game.tw-pddl").write_text(content)
    started: list[StandIn] = []

    def start(path: str, asked: object, wrappers: list[object]) -> StandIn:
        started.append(StandIn(Path(path).parent.name))
        return started[-1]

    textworld = ModuleType("textworld")
    textworld.__dict__.update(start=start, EnvInfos=SimpleNamespace)
    wrappers = ModuleType("alfred_tw_env")
    wrappers.__dict__.update(AlfredDemangler=lambda shuffle: shuffle)
    monkeypatch.setitem(sys.modules, "textworld", textworld)
    monkeypatch.setitem(sys.modules, "alfworld.agents.environment.alfred_tw_env", wrappers)
    for package in ("alfworld", "alfworld.agents", "alfworld.agents.environment"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))

    with pytest.raises(ConfigError, match="no games"):
        ALFWorld(data_path=str(tmp_path / "json_2.1.1"))
    world = ALFWorld(data_path=str(tmp_path), max_steps=3)
    assert [world.reset(seed, {}).split(":")[0] for seed in range(4)] == ["a", "b", "a", "a"]
    assert all(game.closed for game in started[:-1]), "one game at a time"
    assert not world.step("sing").valid
    reply = world.step("<answer>take apple 1 from shelf 1</answer>")
    assert reply.done and reply.success and reply.reward == 1.0 and reply.valid
    assert world.reset(0, {"game": "json_2.1.1/valid_seen/e/game.tw-pddl"}).startswith("e:")
    assert [world.step("look").done for _ in range(3)] == [False, False, True]
    world.close()
    assert started[-1].closed
