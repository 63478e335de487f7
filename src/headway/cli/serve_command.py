"""`headway serve`: a model behind an OpenAI-compatible endpoint.

    headway serve runs/mine                                 the newest checkpoint of a run
    headway serve Qwen/Qwen2.5-0.5B-Instruct --port 8000    any model, by directory or name
    headway serve MODEL sequence_length=8192 --host 0.0.0.0 --token SECRET

Answers `/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/health` until it is interrupted. Requests in
flight are then finished and new ones refused; a second interrupt ends it at once.
"""

import argparse
import asyncio
import os
import signal
from pathlib import Path

from headway.cli.command_line import at_least_one, print_warning
from headway.errors import ConfigError
from headway.launch.inference_session import PreparedServing, open_completion_server, prepare_serving
from headway.runs.run_directory import find_checkpoint_of_run
from headway.serving.agent_environment import require_aiohttp

HELP = "answer over HTTP, as OpenAI's servers do"
TOKEN = "HEADWAY_TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|RUN", help="model directory or name, or the directory of a run")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="overrides, such as sequence_length=8192")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need a token")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (8000); 0 takes a free one")
    parser.add_argument("--token", help=f"what clients send as their API key (${TOKEN})")
    parser.add_argument("--name", help="what the model is called (the name of its directory)")
    parser.add_argument("--max-body-mb", type=at_least_one, default=16, help="largest request (16)")
    parser.add_argument("--max-requests", type=at_least_one, default=256, help="requests at work at once (256)")


def run_command(args: argparse.Namespace) -> int:
    require_aiohttp()
    from headway.serving.completion_server import check_address

    args.token = args.token or os.environ.get(TOKEN) or None
    check_address(args.host, args.port, args.token)
    ready = prepare_serving(find_model(args.model), args.arguments)
    asyncio.run(_serve(ready, args))
    return 0


async def _serve(ready: PreparedServing, args: argparse.Namespace) -> None:
    from headway.serving.completion_server import ServerLimits

    stopped, task = asyncio.Event(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if stopped.is_set():
            task.cancel()
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    limits = ServerLimits(body_mb=args.max_body_mb, requests=args.max_requests)
    name = args.name or Path(args.model).name or ready.context.policy.path.name
    async with open_completion_server(
        ready, name, host=args.host, port=args.port, token=args.token, limits=limits
    ) as address:
        print(f"{name} at {address}/v1 (up to {ready.context_tokens} tokens)", flush=True)
        await stopped.wait()


def find_model(name: str) -> str:
    """Return the newest checkpoint of a run directory, and any other name as it is."""
    path = Path(name)
    if not path.is_dir() or (path / "config.json").is_file():
        return name
    checkpoint = find_checkpoint_of_run(path, print_warning)
    if checkpoint is None:
        hint = "a model has config.json, a run has checkpoints"
        raise ConfigError("is neither a model nor a run with a checkpoint", key="MODEL", value=name, hint=hint)
    return str(checkpoint)
