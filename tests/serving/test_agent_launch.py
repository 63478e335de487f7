"""Programs as agents: told by their environment, ended with everything they started."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError, EnvironmentFailed
from headway.serving.agent_environment import AgentConnection
from headway.serving.agent_launch import make_agent_launcher, run_agent_program
from tests.serving.factory import Stage, episodes

TALKER = """
import json, os, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(asked))

task = json.loads(os.environ["HEADWAY_TASK"])
message = {"role": "user", "content": task["question"]}
body = {"model": os.environ["HEADWAY_MODEL"], "messages": [message]}
found = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
post(os.environ["HEADWAY_REWARD_URL"], {"reward": found["usage"]["completion_tokens"]})
print("x" * 1_000_000)
"""
LEAVER = """
import os, sys, time

known, knows = os.pipe()
if os.fork():
    os.read(known, 1)
    time.sleep(600 * int(sys.argv[2]))
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1], "w") as pipe:
    pipe.write(str(os.getpid()))
os.write(knows, b"!")
time.sleep(600)
"""
"""Leaves somebody behind who has left its session, and stays itself or not."""
INVITATION = AgentConnection(base_url="http://127.0.0.1:1/v1", api_key="k", model="m", task={})


def test_a_program_plays_an_episode(stage: Stage, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(TALKER)

    async def main() -> None:
        async with episodes(stage) as world:
            launch = make_agent_launcher({"command": [sys.executable, "-S", str(program)]})
            episode = await world.play(launch, data={"question": "1+2="})
            assert episode.turns[0].reward == len(episode.turns[0].generation.actions)
            assert "1+2=" in stage.made.template.decode(episode.turns[0].observation)

    stage.run(main())


def alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


@pytest.mark.parametrize("stays", [False, True])
def test_nothing_that_a_program_started_outlives_it(stays: bool, tmp_path: Path) -> None:
    program, pipe = tmp_path / "agent.py", tmp_path / "pipe"
    program.write_text(LEAVER)
    os.mkfifo(pipe)

    async def main() -> None:
        command = [sys.executable, "-S", str(program), str(pipe), str(int(stays))]
        work = asyncio.ensure_future(run_agent_program(command, INVITATION))
        left = await asyncio.to_thread(pipe.read_text)
        if stays:
            assert alive(left)
            work.cancel()
        await asyncio.wait([work])
        assert work.cancelled() is stays
        assert not alive(left)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_program_that_fails_says_why() -> None:
    async def main() -> None:
        command = [sys.executable, "-S", "-c", "import sys; print('no luck'); sys.exit(3)"]
        with pytest.raises(EnvironmentFailed, match="ended with code 3: no luck"):
            await run_agent_program(command, INVITATION)
        with pytest.raises(EnvironmentFailed, match="code 127: /no/such: No such file"):
            await run_agent_program(["/no/such"], INVITATION)

    asyncio.run(main())


async def agent(base_url: str, api_key: str, model: str, task: dict[str, Any], tries: int = 1) -> float:
    return float(tries)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either agent or command"),
        ({"agent": "a:b", "command": ["x"]}, "either agent or command"),
        ({"agent": "nothing"}, "names no function"),
        ({"agent": "no_such_module:solve"}, "cannot be imported"),
        ({"agent": f"{__name__}:agents"}, "did you mean 'agent'"),
        ({"agent": f"{__name__}:agent", "trys": 2}, "unexpected keyword argument 'trys'"),
        ({"command": "python agent.py"}, "must be a list of words"),
        ({"command": ["x"], "tries": 2}, "no further options"),
    ],
)
def test_mistakes_are_found_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_agent_launcher(options)


def test_options_of_the_agent_reach_it() -> None:
    launch = make_agent_launcher({"agent": f"{__name__}:agent", "tries": 3})

    async def main() -> None:
        assert await launch(INVITATION) == 3.0

    asyncio.run(main())
