"""`headway dashboard`: a live page about the runs below a directory, served on this machine.

    headway dashboard                                  all runs below runs/
    headway dashboard runs/mine                        one run, at work or ended
    headway dashboard /data/runs --host 0.0.0.0 --token SECRET

The page reads event logs, ledgers and sample logs, and changes nothing. Beyond this machine it needs a token. It ends
with an interrupt.
"""

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from headway.cli.serve_command import TOKEN
from headway.errors import ConfigError, HeadwayError
from headway.extras import suggest_install

HELP = "show runs live in a browser"
_PORT = 6008


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "directory of a run, or of many (runs)"
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help=where)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need a token")
    parser.add_argument("--port", type=int, help=f"port to listen on ({_PORT}, or a free one if that is taken)")
    parser.add_argument("--token", help=f"what visitors have to know (${TOKEN}); `random` makes one")
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)  # a socket that `headway train` has opened


def run_command(args: argparse.Namespace) -> int:
    """Serve until an interrupt."""
    require_dashboard()
    if not args.directory.is_dir():
        raise HeadwayError(f"{args.directory}: there is no such directory")
    token = args.token or os.environ.get(TOKEN) or None
    token = secrets.token_urlsafe(16) if token == "random" else token
    asyncio.run(_serve(args, token))
    return 0


def require_dashboard() -> None:
    """Raise `ConfigError` if a package is missing that the dashboard needs."""
    missing = [name for name in ("aiohttp", "numpy") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the dashboard needs {' and '.join(missing)}", hint=suggest_install("dashboard"))


def _open_port(host: str, port: int | None) -> socket.socket:
    """Listen on `port`, or on the usual one and where that is taken on any that is free. Raises `ConfigError`."""
    from headway.dashboard.dashboard_server import open_listener

    if port is not None:
        return open_listener(host, port)
    try:
        return open_listener(host, _PORT)
    except ConfigError:
        return open_listener(host, 0)


async def _serve(args: argparse.Namespace, token: str | None) -> None:
    from headway.dashboard.dashboard_server import DashboardServer
    from headway.dashboard.run_catalogue import RunCatalogue
    from headway.serving.completion_server import check_address

    if args.listener is None:
        check_address(args.host, _PORT if args.port is None else args.port, token)
        listener = _open_port(args.host, args.port)
    else:
        listener = socket.socket(fileno=args.listener)
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    if args.listener is not None:
        threading.Thread(target=_stop_with_parent, args=(loop, stopped), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with DashboardServer(RunCatalogue(args.directory), token=token).serve(listener):
        host, port = listener.getsockname()[:2]
        secret = f"/?token={token}" if token else ""
        if args.listener is None:
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}{secret}"
            print(f"{address}  runs in {args.directory}, Ctrl-C to end", flush=True)
        await stopped.wait()


def _stop_with_parent(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """Wait until standard input is closed, which the end of the parent does in whatever way it ends."""
    sys.stdin.read()
    loop.call_soon_threadsafe(stopped.set)
