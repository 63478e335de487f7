"""A Python tool: every call runs a program of its own in the sandbox.

Nothing persists between calls, and the program sees nothing of the machine. The answer is what it prints. A program
that loops, exceeds a limit or fails is an answer too: the policy reads how it ended.
"""

import asyncio
from weakref import WeakKeyDictionary

from headway.environments.tools.base import Tool, ToolArguments, make_schema
from headway.errors import ConfigError, EnvironmentFailed
from headway.rewards.sandbox_fusion_client import SandboxFusionClient
from headway.sandbox import ProgramEnding, ProgramOutcome, Sandbox, SandboxBroken, SandboxLimits, SandboxRefused
from headway.sandbox.probe import find_quick_problem

_SANDBOXES: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


def get_shared_sandbox() -> Sandbox:
    """Return the sandbox of this event loop. All environments share it, so they start no more programs than cores."""
    loop = asyncio.get_running_loop()
    if loop not in _SANDBOXES:
        _SANDBOXES[loop] = Sandbox()
    return _SANDBOXES[loop]


def require_sandbox(wanted_by: str) -> None:
    """Raise `ConfigError` if a quick check shows that there is no sandbox."""
    problem = find_quick_problem()
    if problem:
        raise ConfigError(f"needs the sandbox: {problem}", key="env_type", value=wanted_by)


def make_python_tool(
    *, timeout_s: float = 5.0, memory_mb: int = 256, longest: int = 4000, sandbox_url: str | None = None
) -> Tool:
    """Make the tool; an answer has at most `longest` characters. Raises `ConfigError` without a sandbox.

    `sandbox_url`: a Sandbox Fusion server that runs the programs instead of this machine.
    """
    server = None if sandbox_url is None else SandboxFusionClient(sandbox_url)
    if server is None:
        require_sandbox("python")
    limits = SandboxLimits(wall_s=timeout_s, cpu_s=int(timeout_s) + 1, memory_mb=memory_mb, output_kb=64)

    async def call(arguments: ToolArguments) -> str:
        try:
            sandbox = server or get_shared_sandbox()
            outcome = await sandbox.run_python(arguments["code"], limits=limits)
        except (SandboxRefused, SandboxBroken) as error:
            raise EnvironmentFailed(f"python: {error}") from error
        return format_outcome(outcome, longest)

    return Tool(
        name="python",
        description="Run a Python program; answers with what it prints. Nothing is kept between calls.",
        parameters=make_schema({"code": "string"}),
        call=call,
    )


def format_outcome(outcome: ProgramOutcome, longest: int) -> str:
    """Return a program's output and how it ended; a long output is cut in the middle."""
    text = outcome.stdout
    if outcome.stderr:
        text = f"{text.rstrip()}\n{outcome.stderr}" if text else outcome.stderr
    text = shorten_middle(text.rstrip(), longest)
    if outcome.ending is not ProgramEnding.EXITED:
        return f"{text}\n[ended: {outcome.ending}]".strip()
    return text if outcome.exit_code == 0 else f"{text}\n[exit code {outcome.exit_code}]".strip()


def shorten_middle(text: str, longest: int) -> str:
    """Return the beginning and the end of a text of more than `longest` characters."""
    half = longest // 2
    if len(text) <= longest:
        return text
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
