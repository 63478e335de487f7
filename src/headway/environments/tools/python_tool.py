"""Python as a tool: every call is a program of its own in the sandbox.

Nothing is kept between calls and nothing of the machine is seen; what it prints is the answer. Programs that loop, take
too much or fail are answers as well: the policy reads how they ended.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from headway.environments.tools.base import Tool, ToolArguments
from headway.errors import ConfigError, EnvironmentFailed
from headway.sandbox import (
    ProgramEnding,
    ProgramOutcome,
    Sandbox,
    SandboxBroken,
    SandboxLimits,
    SandboxRefused,
)
from headway.sandbox.probe import find_quick_problem

_SANDBOXES: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


def get_shared_sandbox() -> Sandbox:
    """One for every event loop, so that all environments together start no more programs than there are cores."""
    loop = asyncio.get_running_loop()
    if loop not in _SANDBOXES:
        _SANDBOXES[loop] = Sandbox()
    return _SANDBOXES[loop]


def require_sandbox(wanted_by: str) -> None:
    """Raises `ConfigError` where there is certainly no sandbox."""
    problem = find_quick_problem()
    if problem:
        raise ConfigError(f"needs the sandbox: {problem}", key="env_type", value=wanted_by)


def make_python_tool(*, timeout_s: float = 5.0, memory_mb: int = 256, longest: int = 4000) -> Tool:
    """Answers with at most `longest` characters. Raises `ConfigError` where there is no sandbox."""
    require_sandbox("python")
    limits = SandboxLimits(wall_s=timeout_s, cpu_s=int(timeout_s) + 1, memory_mb=memory_mb, output_kb=64)

    async def call(arguments: ToolArguments) -> str:
        try:
            outcome = await get_shared_sandbox().run_python(arguments["code"], limits=limits)
        except (SandboxRefused, SandboxBroken) as error:
            raise EnvironmentFailed(f"python: {error}") from error
        return format_outcome(outcome, longest)

    return Tool(
        name="python",
        description="Run a Python program; answers with what it prints. Nothing is kept between calls.",
        parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        call=call,
    )


def format_outcome(outcome: ProgramOutcome, longest: int) -> str:
    """What a program said and how it ended, cut in the middle where it is long."""
    text = outcome.stdout
    if outcome.stderr:
        text = f"{text.rstrip()}\n{outcome.stderr}" if text else outcome.stderr
    text = shorten_middle(text.rstrip(), longest)
    if outcome.ending is not ProgramEnding.EXITED:
        return f"{text}\n[ended: {outcome.ending}]".strip()
    return text if outcome.exit_code == 0 else f"{text}\n[exit code {outcome.exit_code}]".strip()


def shorten_middle(text: str, longest: int) -> str:
    """Beginning and end of a text of more than `longest` characters."""
    half = longest // 2
    return (
        text
        if len(text) <= longest
        else f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    )
