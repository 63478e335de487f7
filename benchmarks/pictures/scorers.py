"""Scorers with random scores and a known cost: processor time beside generation, or a wait over HTTP.

python -m benchmarks.pictures.scorers PORT LATENCY_S                 # the server alone
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headway.rewards.reward_worker_pool import RewardWorkerPool
from headway.types import Episode, Score


def burn(name: str, seconds: float) -> float:
    """Compute for a while in a worker process. Processor time counts, so that sharing a core takes longer."""
    until, found = time.process_time() + seconds, 0
    while time.process_time() < until:
        found = zlib.crc32(name.encode(), found)
    return zlib.crc32(name.encode()) / 2**32


class ComputingReward:
    """A scorer that computes in its own processes."""

    def __init__(self, score_s: float, workers: int) -> None:
        self._score_s, self._workers = score_s, RewardWorkerPool(workers)

    async def score(self, episode: Episode) -> Score:
        score = await self._workers.call(
            "benchmarks.pictures.scorers:burn", episode.sample_id, self._score_s, timeout_s=60.0
        )
        return Score(value=score)


class RandomScores:
    """Random scores that cost nothing."""

    async def score(self, episode: Episode) -> Score:
        return Score(value=zlib.crc32(episode.sample_id.encode()) / 2**32)


class WaitingReward:
    """A scorer on the virtual clock: it takes `seconds` each, `at_once` at a time."""

    def __init__(self, seconds: float, at_once: int) -> None:
        self._seconds, self._slots = seconds, asyncio.Semaphore(at_once)

    async def score(self, episode: Episode) -> Score:
        async with self._slots:
            await asyncio.sleep(self._seconds)
        return Score(value=zlib.crc32(episode.sample_id.encode()) / 2**32)


@contextmanager
def start_server(latency_s: float) -> Iterator[str]:
    """Run a scorer behind HTTP in its own process; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = subprocess.Popen([sys.executable, "-m", __name__, str(port), str(latency_s)], cwd=Path(__file__).parents[2])
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/"
    finally:
        child.kill()
        child.wait()


def serve(port: int, latency_s: float) -> None:
    """Answer every request after `latency_s`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(latency_s)
            found = [zlib.crc32(one["png"].encode()) / 2**32 for one in json.loads(body)["samples"]]
            answer = json.dumps({"scores": found}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            return None

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024

        def service_actions(self) -> None:
            if os.getppid() != parent:  # the benchmark has ended
                os._exit(0)

    parent = os.getppid()
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
