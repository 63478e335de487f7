"""Repair: the bugs are real, a fix is worth 1, and tricks are worth nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from types import ModuleType
from typing import Any, TypeVar

import pytest

from headway.environments.library.repair import RepairEnvironment
from headway.environments.library.repair_repository import (
    REPAIR_MODULES,
    RepairCheck,
    RepairRepository,
    call_outcome,
    make_checks,
    make_repository,
)
from headway.environments.text_environment import Reply
from headway.errors import ConfigError
from tests.sandbox.factory import require_sandbox

T = TypeVar("T")


def play(scene: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(scene)


def call(name: str, **arguments: str) -> str:
    return f"I try this.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def module_from(source: str) -> ModuleType:
    module = ModuleType("broken")
    exec(compile(source, "broken.py", "exec"), module.__dict__)
    return module


def differs(module: ModuleType, call: RepairCheck) -> bool:
    return bool(call_outcome(getattr(module, call.function), call.arguments) != call.expected)


@pytest.mark.parametrize("name", REPAIR_MODULES)
def test_every_bug_is_in_the_text_once_and_seen_by_a_call_that_is_shown(name: str) -> None:
    source = REPAIR_MODULES[name].source
    right = module_from(source)
    for old, new in REPAIR_MODULES[name].bugs:
        assert source.count(old) == 1, old
        broken = module_from(source.replace(old, new))
        calls = [(function, arguments) for function, shown in REPAIR_MODULES[name].calls.items() for arguments in shown]
        seen = [
            call_outcome(getattr(broken, function), arguments) != call_outcome(getattr(right, function), arguments)
            for function, arguments in calls
        ]
        assert any(seen), f"nothing shows {old!r} → {new!r}"
        hidden = [
            any(differs(broken, call) for call in make_checks(seed, name) if not call.shown) for seed in range(10)
        ]
        assert sum(hidden) >= 9, f"hidden calls rarely see {old!r} → {new!r}"


def test_the_seed_decides_the_repository() -> None:
    def repositories() -> list[Any]:
        return [make_repository(seed, modules=3, bugs=2) for seed in range(20)]

    assert repositories() == repositories()
    assert len({json.dumps(dict(one.files)) for one in repositories()}) == 20
    for one in repositories():
        assert len(one.broken) == 2 and all(one.files[path] != one.right[path] for path in one.broken)
        assert {call.module for call in one.checks if not call.shown} == {
            call.module for call in one.checks if call.shown
        }


async def fixed(world: RepairEnvironment) -> Reply:
    for path, right in world.repository.right.items():
        await world.step(call("write", path=path, content=right))
    return await world.step(call("submit"))


def test_a_fix_is_worth_one_and_nothing_else_is() -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=2)
        for seed in (0, 1):
            listing = await world.reset(seed, {})
            assert isinstance(listing, str) and world.repository.broken[0] in listing
            untouched = await world.step(call("submit"))
            assert untouched.done and untouched.reward == 0.0 and untouched.info["shown"] < 1.0
            await world.reset(seed, {})
            reply = await fixed(world)
            assert reply.done and reply.success and reply.reward == 1.0, reply

    play(scene())


def bug_in(repository: RepairRepository) -> tuple[str, str, str]:
    """The path, what stands there, and what should."""
    (path,), (right,) = repository.broken, repository.right.values()
    bugs = REPAIR_MODULES[path.split("/")[1].removesuffix(".py")].bugs
    return next((path, new, old) for old, new in bugs if right.replace(old, new) == repository.files[path])


def has_a_simple_bug(seed: int) -> bool:
    repository = make_repository(seed, modules=1, bugs=1)
    path, wrong, _ = bug_in(repository)
    return bool(wrong) and repository.files[path].count(wrong) == 1


SIMPLE = next(filter(has_a_simple_bug, range(100)))


def test_the_shell_sees_failing_tests_and_passing_ones_after_an_edit() -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=1)
        await world.reset(SIMPLE, {})
        before = await world.step(call("shell", command="python3 -m unittest"))
        assert "FAILED" in before.text and "[exit code 1]" in before.text
        path, wrong, right = bug_in(world.repository)
        edited = await world.step(call("edit", path=path, old=wrong, new=right))
        assert "Wrote" in edited.text, edited
        after = await world.step(call("shell", command="python3 -m unittest"))
        assert "\nOK\n" in after.text and "exit code" not in after.text, after.text
        assert (await world.step(call("submit"))).reward == 1.0

    play(scene())


CHEATS = {
    "tests deleted": "rm -r tests",
    "tests emptied": "for f in tests/*.py; do echo > $f; done",
    "exit before the end": "for f in */*.py; do printf 'import os\\nos._exit(0)\\n' > $f; done",
    "equal to everything": (
        "for f in */*.py; do printf 'class E(list):\\n def __eq__(s, o): return True\\n"
        "def __getattr__(n): return lambda *a: E()\\n' > $f; done"
    ),
    "a report of one's own": (
        'for f in */*.py; do printf \'import os\\nfor fd in range(20):\\n try: os.write(fd, b"[]")\\n'
        " except OSError: pass\\n' > $f; done"
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_is_worth_nothing(cheat: str) -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=1)
        await world.reset(2, {})
        reply = await world.step(call("shell", command=CHEATS[cheat]) + call("submit"))
        assert reply.done and reply.reward == 0.0 and not reply.success

    play(scene())


def test_passing_the_shown_tests_alone_is_not_enough() -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=1)
        await world.reset(2, {})
        (path,) = world.repository.broken
        table = {
            f"{one.function}{json.dumps(one.arguments)}": one.expected for one in world.repository.checks if one.shown
        }
        learned = (
            f"import json\nT = {table!r}\nclass R(dict): pass\n"
            "def answer(name, args):\n"
            "    value = T[name + json.dumps(args)]\n"
            "    if isinstance(value, dict) and 'raises' in value: raise __builtins__[value['raises']]()\n"
            "    return value\n"
            "def __getattr__(name): return lambda *args: answer(name, args)\n"
        )
        await world.step(call("write", path=path, content=learned))
        reply = await world.step(call("submit"))
        assert reply.info["shown"] == 1.0 and reply.info["hidden"] < 1.0 and reply.reward == 0.0

    play(scene())


def test_files_last_through_an_episode_and_no_longer() -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=1)
        await world.reset(0, {})
        await world.step(
            call("shell", command="mkdir notes && echo kept > notes/a.txt && echo gone > /tmp/b; sleep 60 &")
        )
        assert "kept" in (await world.step(call("shell", command="cat notes/a.txt; ls /tmp/b"))).text
        assert "notes/a.txt" in world.workspace.files
        await world.reset(0, {})
        assert "notes/a.txt" not in world.workspace.files

    play(scene())


def test_what_takes_too_much_is_told_and_changes_nothing() -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=1, timeout_s=0.5)
        await world.reset(0, {})
        before = dict(world.workspace.files)
        assert "[ended after 0.5 s]" in (await world.step(call("shell", command="sleep 30"))).text
        assert "as they were" in (await world.step(call("shell", command="head -c 3000000 /dev/zero > big"))).text
        assert "as they were" in (await world.step(call("shell", command="kill -9 $PPID"))).text
        for command in ("echo a\0b", "true " + "x" * 200_000, "echo \ud800", "head -c 9000000 /dev/urandom"):
            assert not (await world.step(call("shell", command=command))).done
        assert world.workspace.files == before

    play(scene())


def test_calls_that_make_no_sense_are_invalid_or_refused() -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=1)
        await world.reset(0, {})
        for said in ("", "I am done.", "<tool_call>{</tool_call>", call("format"), call("edit", path="README.md")):
            assert not (await world.step(said)).valid
        for path in ("../x", "/etc/passwd", "", "README.md/x", "a\0b"):
            reply = await world.step(call("write", path=path, content="x"))
            assert reply.valid and "Error" in reply.text
        assert "0 times" in (await world.step(call("edit", path="README.md", old="no such text", new=""))).text

    play(scene())


def test_the_last_step_is_judged_without_submitting() -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=1, max_steps=2)
        await world.reset(0, {})
        path, right = next(iter(world.repository.right.items()))
        assert not (await world.step(call("write", path=path, content=right))).done
        reply = await world.step("Now I only think.")
        assert reply.done and reply.reward == 1.0 and not reply.valid and not reply.info["submitted"]

    play(scene())


def test_sizes_that_cannot_be_are_refused() -> None:
    require_sandbox()
    for options in ({"modules": 0}, {"modules": 99}, {"bugs": 4}, {"max_steps": 1}):
        with pytest.raises(ConfigError):
            RepairEnvironment(**options)
