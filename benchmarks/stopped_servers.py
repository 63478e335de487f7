"""A server that is stopped (SIGSTOP) in each phase of an update: how long until that is known, and what is said.

    python benchmarks/stopped_servers.py --out stopped.json                                     # vLLM on one GPU
    python benchmarks/stopped_servers.py --way "sglang over HTTP" --python PYTHON
    python benchmarks/stopped_servers.py --shape tiny --device cpu --python PYTHON              # files instead of IPC

All processes of the server are stopped at the moment at which the call of a phase is sent. The update must end within
the deadline of that phase, with its name. Then they run again, so that the next phase does not wait for another start,
and an update must go through. After the last phase they stay stopped: the engine is restarted as a run restarts it, and
given the newest version.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.end_to_end import SHAPES, machine
from benchmarks.server_engines import WAYS, make_empty_model, make_engine, make_tensors, measure_engine

from headway.engines.servers.http_client import HttpClient
from headway.engines.streaming_engine import StreamError
from headway.errors import HeadwayError
from headway.weights.device_memory import DeviceArena
from headway.weights.weight_store import SharedArena, WeightStore

PHASES = {
    "vllm": {
        "cuda": {
            "pause": "/pause",
            "init": "/init_weight_transfer_engine",
            "start": "/start_weight_update",
            "update": "/update_weights",
            "finish": "/finish_weight_update",
            "cache": "/reset_prefix_cache",
            "label": "/collective_rpc",
            "resume": "/resume",
        },
        "cpu": {
            "pause": "/pause",
            "loading files": "/collective_rpc",
            "cache": "/reset_prefix_cache",
            "label": "/update_weight_version",
            "resume": "/resume",
        },
    },
    "sglang": {
        "cuda": {
            "pause": "/abort_request",
            "update": "/update_weights_from_tensor",
            "cache": "/flush_cache",
            "resume": "/continue_generation",
        }
    },
}


class Stopper:
    """Stops processes when a call is sent."""

    def __init__(self) -> None:
        self.path, self.pids = "", list[int]()
        post = HttpClient.post
        stopper = self

        async def stop_and_post(self: HttpClient, path: str, *args: Any, **options: Any) -> Any:
            if stopper.path and path.startswith(stopper.path):
                stopper.path = ""
                stopper.signal(signal.SIGSTOP)
            return await post(self, path, *args, **options)

        HttpClient.post = stop_and_post  # type: ignore[method-assign]

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def find_family(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *(one for word in words for one in find_family(int(word)))]


async def update(engine: Any, store: WeightStore, tensors: Any, version: int) -> None:
    """Publish a version and bring it to the engine."""
    store.publish(version, tensors)
    manifest, buckets = await store.gather(version)
    await engine.receiver.begin(manifest)
    async for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()


async def stop_in_phase(engine: Any, store: WeightStore, tensors: Any, version: int, stopper: Stopper) -> Any:
    """Return the seconds until the update has failed, and its error."""
    begin = time.perf_counter()
    try:
        await update(engine, store, tensors, version)
    except HeadwayError as error:
        return time.perf_counter() - begin, str(error)
    return time.perf_counter() - begin, ""


async def recover(engine: Any, stopper: Stopper, limit_s: float) -> None:
    """Let the server run again, end what it had begun, and take the engine up without another start."""
    stopper.signal(signal.SIGCONT)
    await asyncio.sleep(1.0)
    client = HttpClient(engine._server.url)
    for path in ("/update_weights", "/finish_weight_update"):  # refused, where no update had begun
        with suppress(StreamError):
            await client.post(path, {"update_info": {}} if path == "/update_weights" else None, timeout_s=limit_s)
    await client.close()
    engine._crash, engine._paused = None, False
    engine.receiver.reset(gone=False)
    engine._open.set()


async def measure(args: argparse.Namespace, model: Path, scratch: Path) -> list[dict[str, Any]]:
    kind = "cuda_ipc" if args.device == "cuda" else "shared_memory"
    engine = make_engine(args, args.way, kind, model, scratch)
    engine._settings = replace(engine._settings, call_s=args.deadline_s, load_s=args.deadline_s)
    arena = DeviceArena("cuda") if args.device == "cuda" else SharedArena()
    store = WeightStore(bucket_mb=512.0, wire_dtype=None, arena=arena)
    tensors = make_tensors(model, args.device)
    stopper, rows, version = Stopper(), [], 0
    try:
        await engine.start()
        await update(engine, store, tensors, version)
        guard = engine._server.pid
        stopper.pids = [pid for pid in find_family(guard) if pid != guard]
        for phase, path in PHASES[args.way.split()[0]][args.device].items():
            version += 1
            stopper.path = path
            seconds, said = await stop_in_phase(engine, store, tensors, version, stopper)
            rows.append({"phase": phase, "seconds": seconds, "deadline_s": args.deadline_s, "said": said[:300]})
            print(json.dumps(rows[-1]), flush=True)
            await recover(engine, stopper, args.deadline_s)
            await update(engine, store, tensors, version)
        version += 1
        stopper.path = "/pause"
        seconds, said = await stop_in_phase(engine, store, tensors, version, stopper)
        begin = time.perf_counter()
        await engine.restart()
        again = time.perf_counter() - begin
        engine._settings = replace(engine._settings, call_s=30.0, load_s=60.0)
        found = await measure_engine(engine, store, tensors, version + 1, 1)
        rows.append({"phase": "stopped for good", "seconds": seconds, "said": said[:300], "restart_s": again, **found})
        print(json.dumps(rows[-1]), flush=True)
    finally:
        stopper.signal(signal.SIGCONT)
        if args.out:
            args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1), encoding="utf-8")
        await engine.close()
    return rows


def main() -> None:
    """Stop a server in each phase."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--way", choices=[way for way in WAYS if "HTTP" in way], default="vllm over HTTP")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--deadline-s", type=float, default=3.0)
    parser.add_argument("--python", default="", help="interpreter that has vLLM or SGLang; empty: this one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.prompts, args.length, args.steps, args.eager, args.load_format = 8, 128, 1, True, "dummy"
    args.transport, args.share, args.learning_rate, args.vocabulary = "auto", 0.06, 1e-6, 0
    scratch = Path(tempfile.mkdtemp(prefix="headway-servers-"))
    asyncio.run(measure(args, make_empty_model(scratch / "model", args), scratch))


if __name__ == "__main__":
    main()
