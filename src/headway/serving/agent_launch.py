"""Ways to start somebody's agent: a function of Python's, or a program.

    agent: "my_agents:solve"                 async def solve(base_url, api_key, model, task) -> float
    command: [python, my_agent.py]           told by OPENAI_BASE_URL, OPENAI_API_KEY, HEADWAY_MODEL, HEADWAY_TASK

A function that is not `async` runs on a thread of its own; what it prints is not shown. A program that ends with an
error has failed; its reward it posts to `$HEADWAY_REWARD_URL`. No program, and nothing that it started, outlives its
episode or the run, also where the run is killed: a watchdog stands between them.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any

from headway.environments.environment_output import OutputCounter, discard_output
from headway.environments.environment_registry import find_environment_class
from headway.errors import ConfigError, EnvironmentFailed
from headway.processes.child_process import WatchedProgram
from headway.serving.agent_environment import AgentConnection, AgentLauncher

_OUTPUT_TAIL_CHARACTERS = 2000
"""Characters of a program's output that are kept for the case that it fails."""
_AGENT_ARGUMENTS = ("base_url", "api_key", "model", "task")


def make_agent_launcher(options: Mapping[str, Any]) -> AgentLauncher:
    """What `env_config` describes: `agent` with further keywords for it, or `command`. Raises `ConfigError`."""
    given = dict(options)
    agent, command = given.pop("agent", None), given.pop("command", None)
    if (agent is None) == (command is None):
        raise ConfigError("needs either agent or command", key="env_config", value=dict(options))
    if command is not None:
        return _make_program_launcher(command, given)
    if not isinstance(agent, str) or ":" not in agent:
        hint = "module:function, or path/to/file.py:function"
        raise ConfigError("names no function", key="env_config.agent", value=agent, hint=hint)
    try:
        function: Callable[..., Any] = find_environment_class(agent)
    except ConfigError as error:
        raise ConfigError(str(error), key="env_config.agent", value=agent) from error
    _check_agent_arguments(function, agent, given)
    return make_function_launcher(function, given)


def make_function_launcher(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> AgentLauncher:
    """A function as an agent, called by keyword with what an `AgentConnection` has."""
    further = dict(arguments or {})

    async def launch(invitation: AgentConnection) -> Any:
        told = {name: getattr(invitation, name) for name in _AGENT_ARGUMENTS}
        told["task"] = dict(invitation.task)
        with discard_output(OutputCounter()):
            if inspect.iscoroutinefunction(function):
                return await function(**told, **further)
            inside = copy_context()
            return await _run_on_thread(lambda: inside.run(lambda: function(**told, **further)))

    return launch


async def _run_on_thread(call: Callable[[], Any]) -> Any:
    """One of its own: an agent holds it for a whole episode. It ends soon after its session, whose calls then fail."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(value) if error is None else done.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except Exception as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(tell, value, error)
        except RuntimeError:
            return  # the run is over

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await done


def _make_program_launcher(command: Any, further: Mapping[str, Any]) -> AgentLauncher:
    if not isinstance(command, list | tuple) or not command or not all(isinstance(word, str) for word in command):
        raise ConfigError("must be a list of words", key="env_config.command", value=command, hint="[python, agent.py]")
    if further:
        raise ConfigError("a command takes no further options", key="env_config", value=dict(further))

    async def launch(invitation: AgentConnection) -> None:
        await run_agent_program(command, invitation)

    return launch


async def run_agent_program(command: Sequence[str], invitation: AgentConnection) -> None:
    """A program as an agent, to its end. Raises `EnvironmentFailed` where it ends with an error."""
    program = await WatchedProgram.start(
        command, env=_make_process_environment(invitation), output=asyncio.subprocess.PIPE
    )
    try:
        said = await _read_output_tail(program.stdout)
        code = await program.wait()
    finally:
        program.end()
        await asyncio.shield(program.wait())
    if code:
        raise EnvironmentFailed(f"{command[0]} ended with code {code}: {said}")


async def _read_output_tail(output: asyncio.StreamReader | None) -> str:
    """Read all output and return the end of it."""
    assert output is not None
    said = b""
    while more := await output.read(1 << 16):
        said = (said + more)[-_OUTPUT_TAIL_CHARACTERS:]
    return said.decode(errors="replace").strip()


def _make_process_environment(invitation: AgentConnection) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": invitation.base_url,
        "OPENAI_API_KEY": invitation.api_key,
        "HEADWAY_MODEL": invitation.model,
        "HEADWAY_TASK": json.dumps(dict(invitation.task)),
        "HEADWAY_REWARD_URL": invitation.base_url.removesuffix("/v1") + "/reward",
    }


def _check_agent_arguments(function: Callable[..., Any], name: str, further: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(_AGENT_ARGUMENTS), **further)
    except TypeError as error:
        hint = f"it is called with {', '.join((*_AGENT_ARGUMENTS, *further))} by keyword"
        raise ConfigError(f"{name}: {error}", key="env_config", value=dict(further), hint=hint) from error
    except ValueError:
        return  # written in C: it will say itself what is wrong
