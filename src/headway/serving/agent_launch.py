"""Starts external agents: Python functions, or programs.

    agent: "my_agents:solve"                 async def solve(base_url, api_key, model, task) -> float
    command: [python, my_agent.py]           reads OPENAI_BASE_URL, OPENAI_API_KEY, HEADWAY_MODEL, HEADWAY_TASK

A function runs on a thread of its own, coroutines on an event loop of their own; what they print is discarded. A
program that exits with an error has failed; it posts its reward to `$HEADWAY_REWARD_URL`. No program, and nothing that
it started, outlives its episode or the run, even if the run is killed: a watchdog process ends it.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.environments.environment_output import OutputCounter, discard_output
from headway.environments.local_host import BlockingCall
from headway.errors import ConfigError, EnvironmentFailed
from headway.processes.child_process import WatchedProgram
from headway.processes.loop_thread import LoopThread
from headway.serving.agent_environment import AgentConnection, AgentLauncher
from headway.user_code import import_function

_OUTPUT_TAIL_CHARACTERS = 2000
"""Length of the output that is kept to explain a failure."""
_AGENT_ARGUMENTS = ("base_url", "api_key", "model", "task")


def make_agent_launcher(options: Mapping[str, Any]) -> AgentLauncher:
    """Make the launcher that `env_config` describes: `agent` and its keywords, or `command`. Raises `ConfigError`."""
    arguments = dict(options)
    agent, command = arguments.pop("agent", None), arguments.pop("command", None)
    if (agent is None) == (command is None):
        raise ConfigError("needs either agent or command", key="env_config", value=dict(options))
    if command is not None:
        return _make_program_launcher(command, arguments)
    if not isinstance(agent, str) or ":" not in agent:
        hint = "module:function, or path/to/file.py:function"
        raise ConfigError("names no function", key="env_config.agent", value=agent, hint=hint)
    function = import_function(agent, key="env_config.agent")
    _check_agent_arguments(function, agent, arguments)
    return make_function_launcher(function, arguments)


def make_function_launcher(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> AgentLauncher:
    """Make a launcher that calls a function with the fields of an `AgentConnection` and further `arguments`."""
    loop_thread = LoopThread("agents")

    async def launch(connection: AgentConnection) -> Any:
        keywords = {
            "base_url": connection.base_url,
            "api_key": connection.api_key,
            "model": connection.model,
            "task": dict(connection.task),
            **(arguments or {}),
        }
        with discard_output(OutputCounter()):
            if inspect.iscoroutinefunction(function):
                return await loop_thread.run(function, **keywords)
            # The thread is free soon after the session ends, because the agent's requests then fail.
            return await BlockingCall("agent", lambda: function(**keywords)).run()

    return launch


def _make_program_launcher(command: Any, arguments: Mapping[str, Any]) -> AgentLauncher:
    if not isinstance(command, list | tuple) or not command or not all(isinstance(word, str) for word in command):
        raise ConfigError("must be a list of words", key="env_config.command", value=command, hint="[python, agent.py]")
    if arguments:
        raise ConfigError("a command takes no further options", key="env_config", value=dict(arguments))

    async def launch(connection: AgentConnection) -> None:
        await run_agent_program(command, connection)

    return launch


async def run_agent_program(command: Sequence[str], connection: AgentConnection) -> None:
    """Run a program as an agent to its end. Raises `EnvironmentFailed` if it exits with an error."""
    environment = {
        "OPENAI_BASE_URL": connection.base_url,
        "OPENAI_API_KEY": connection.api_key,
        "HEADWAY_MODEL": connection.model,
        "HEADWAY_TASK": json.dumps(dict(connection.task)),
        "HEADWAY_REWARD_URL": connection.base_url.removesuffix("/v1") + "/reward",
    }
    program = await WatchedProgram.start(command, env=environment, output=asyncio.subprocess.PIPE)
    try:
        tail = await _read_output_tail(program.stdout)
        code = await program.wait()
    finally:
        program.end()
        await asyncio.shield(program.wait())
    if code:
        raise EnvironmentFailed(f"{command[0]} ended with code {code}: {tail}")


async def _read_output_tail(output: asyncio.StreamReader | None) -> str:
    """Read all output and return the end of it."""
    assert output is not None
    tail = b""
    while data := await output.read(1 << 16):
        tail = (tail + data)[-_OUTPUT_TAIL_CHARACTERS:]
    return tail.decode(errors="replace").strip()


def _check_agent_arguments(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(_AGENT_ARGUMENTS), **arguments)
    except TypeError as error:
        hint = f"it is called with {', '.join((*_AGENT_ARGUMENTS, *arguments))} by keyword"
        raise ConfigError(f"{name}: {error}", key="env_config", value=dict(arguments), hint=hint) from error
    except ValueError:
        return  # C code has no signature; it reports its own errors
