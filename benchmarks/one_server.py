"""One vLLM or SGLang on one card: what updates cost, how far its log-probabilities are, and what happens when it stops.

    python benchmarks/one_server.py "vllm over HTTP" --out one.json             # 0.5B shape, bf16: 1 GB of weights
    python benchmarks/one_server.py vllm                                        # in the engine's process
    python benchmarks/one_server.py "sglang over HTTP" --python PYTHON
    python benchmarks/one_server.py "vllm over HTTP" --shape tiny --device cpu --samples 4 --tokens 16 --python PYTHON

**Updates** The time from the first bucket until the server serves, and of this the part in which nobody generates (the
flip). The trainer's bytes lie on the card and the server opens them by CUDA IPC: over HTTP through vLLM's own weight
transfer or SGLang's update from tensors, in an engine's process through our extension of vLLM's workers; or they go
through files, or in an engine's process through memory of the host.

**Mismatch** As in `benchmarks/engines_mismatch.py`.

**Stops** All processes of a server are stopped (SIGSTOP) when the call of a phase is sent. The update must end in the
deadline of that phase, with its name. Then they run again, so that the next phase does not wait for another start, and
an update must go through. At last they stay stopped: the engine is restarted as a run does it, and given a version.

**Sleep** With `--sleeps` nothing but this: the server frees its memory, the next version wakes it up, and it generates.
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
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.end_to_end import SHAPES, machine
from benchmarks.engines_mismatch import compare, draw_samples
from benchmarks.server_engines import WAYS, make_empty_model, make_engine, make_random_model, measure_engine

from headway.engines.servers.http_client import HttpClient
from headway.engines.servers.server_process import ServerHandle
from headway.engines.streaming_engine import StreamError
from headway.errors import HeadwayError
from headway.weights.device_memory import DeviceArena, IpcArena, make_shareable_memory
from headway.weights.weight_store import SharedArena, WeightStore

PHASES = {
    "vllm cuda": {
        "pause": "/pause",
        "init": "/init_weight_transfer_engine",
        "start": "/start_weight_update",
        "update": "/update_weights",
        "finish": "/finish_weight_update",
        "cache": "/reset_prefix_cache",
        "label": "/collective_rpc",
        "resume": "/resume",
    },
    "vllm cpu": {
        "pause": "/pause",
        "loading files": "/collective_rpc",
        "cache": "/reset_prefix_cache",
        "label": "/update_weight_version",
        "resume": "/resume",
    },
    "sglang cuda": {
        "pause": "/abort_request",
        "update": "/update_weights_from_tensor",
        "cache": "/flush_cache",
        "resume": "/continue_generation",
    },
    "sglang cpu": {
        "pause": "/abort_request",
        "loading files": "/update_weights_from_disk",
        "cache": "/flush_cache",
        "resume": "/continue_generation",
    },
}
"""Path of the call that each phase begins with."""


class CallWatcher:
    """Prints how long each call of a server takes, and stops processes when one of them is sent."""

    def __init__(self) -> None:
        self.path = ""
        self.pids: list[int] = []
        self.prints = True
        post, watcher = HttpClient.post, self

        async def watched_post(self: HttpClient, path: str, *args: Any, **options: Any) -> Any:
            if watcher.path and path.startswith(watcher.path):
                watcher.path = ""
                watcher.send_signal(signal.SIGSTOP)
            begin = time.perf_counter()
            try:
                return await post(self, path, *args, **options)
            finally:
                if watcher.prints:
                    print(f"  {path}: {(time.perf_counter() - begin) * 1e3:.0f} ms", flush=True)

        HttpClient.post = watched_post  # type: ignore[method-assign]

    def send_signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Session:
    """One engine, and the rows that are known about it."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.scratch, self.rows = args, scratch, list[dict[str, Any]]()
        self.model_directory = make_empty_model(scratch / "model", args)
        self.model = make_random_model(self.model_directory, args.device)
        with torch.no_grad():
            self.model.model.norm.weight.mul_(args.sharp)
        self.model.save_pretrained(self.model_directory)
        self.tensors = dict(self.model.named_parameters())
        self.kind = "cuda_ipc" if args.device == "cuda" else "shared_memory"
        self.engine = make_engine(args, args.way, self.kind, self.model_directory, scratch)
        self.inside = args.way == "vllm"
        self.watcher = CallWatcher()
        self.version = 0

    async def run(self) -> None:
        """Start it, and try one thing after the other."""
        begin = time.perf_counter()
        try:
            await self.engine.start()
            self.report({"what": "start", "seconds": time.perf_counter() - begin})
            if self.args.sleeps:
                return await self.attempt("sleep", self.sleep_and_wake)
            await self.attempt("updates on the card", self.update_on_card)
            await self.attempt("mismatch", self.compare_log_probabilities)
            await self.attempt("updates through the host", self.update_through_host)
            if self.args.stops and not self.inside:
                await self.attempt("stops", self.stop_in_phases)
            if self.args.stops:
                await self.attempt("stopped for good", self.stop_for_good)
        finally:
            self.watcher.send_signal(signal.SIGCONT)
            await self.engine.close()

    def report(self, row: dict[str, Any]) -> None:
        """Print a row at once, and write all of them."""
        self.rows.append({"way": self.args.way, **row})
        print(json.dumps(self.rows[-1]), flush=True)
        if self.args.out:
            self.args.out.write_text(json.dumps({"machine": machine(), "rows": self.rows}, indent=1), encoding="utf-8")

    async def attempt(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        """Take a step; whatever goes wrong is a row."""
        try:
            async with asyncio.timeout(self.args.limit_s):
                await step()
        except Exception as error:
            self.report({"what": what, "error": f"{type(error).__name__}: {error}"[:2000]})

    def make_store(self, *, on_card: bool) -> WeightStore:
        device = self.args.device
        card = IpcArena(make_shareable_memory(device)) if self.inside else DeviceArena(device)
        arena = card if on_card and device == "cuda" else SharedArena()
        return WeightStore(bucket_mb=512.0, wire_dtype=None, arena=arena)

    async def update_on_card(self) -> None:
        through_host = "host memory" if self.inside else "files"
        how = "CUDA IPC" if self.args.device == "cuda" else through_host
        await self._update_often(self.engine, how, self.make_store(on_card=True))

    async def update_through_host(self) -> None:
        """Through files for a server, which is reached by a second adapter; through memory of the host otherwise."""
        if self.inside:
            await self._update_often(self.engine, "host memory", self.make_store(on_card=False))
            return
        files = make_engine(self.args, self.args.way, "shared_memory", self.model_directory, self.scratch / "files")
        files._server = ServerHandle(self.engine._server.url)
        try:
            await self._update_often(files, "files", self.make_store(on_card=False))
        finally:
            await files._client.close()

    async def _update_often(self, engine: Any, how: str, store: WeightStore) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        found = await measure_engine(engine, store, self.tensors, self.version, self.args.times)
        self.version += self.args.times + 1
        self.report({"what": "updates", "how": how, "bytes": size, **found})

    async def update_once(self, store: WeightStore) -> None:
        """Publish the next version and bring it to the engine."""
        self.version += 1
        store.publish(self.version, self.tensors)
        manifest, buckets = await store.gather(self.version)
        await self.engine.receiver.begin(manifest)
        async for bucket in buckets:
            await self.engine.receiver.load(bucket)
        await self.engine.receiver.flip()

    async def compare_log_probabilities(self) -> None:
        for sampling, pairs in (await draw_samples(self.engine, self.args)).items():
            self.report({"what": "mismatch", "sampling": sampling, **compare(self.model, pairs)})

    async def sleep_and_wake(self) -> None:
        """Sleep twice; each time the next version wakes the engine up, and it must generate with that version."""
        for _ in range(2):
            await self._update_often(self.engine, "before a sleep", self.make_store(on_card=True))
            awake, begin = read_used_gb(self.args.device), time.perf_counter()
            await self.engine.sleep()
            seconds, asleep = time.perf_counter() - begin, read_used_gb(self.args.device)
            self.report({"what": "sleep", "seconds": seconds, "awake_gb": awake, "asleep_gb": asleep})
        await self._update_often(self.engine, "after a sleep", self.make_store(on_card=True))
        await self.compare_log_probabilities()

    async def stop_in_phases(self) -> None:
        engine, limit_s, usual = self.engine, self.args.deadline_s, self.engine._settings
        store = self.make_store(on_card=True)
        await self.update_once(store)
        self.watcher.pids = find_family(engine._server.pid)[1:]
        for phase, path in PHASES[f"{self.args.way.split()[0]} {self.args.device}"].items():
            engine._settings = replace(usual, call_s=limit_s, load_s=limit_s)
            self.watcher.path = path
            begin, said, back = time.perf_counter(), "", ""
            try:
                await self.update_once(store)
            except HeadwayError as error:
                said = str(error)[:300]
            seconds, engine._settings = time.perf_counter() - begin, usual
            await self._let_run_again()
            try:
                await self.update_once(store)
            except HeadwayError as error:
                back = str(error)[:300]
            row = {"phase": phase, "deadline_s": limit_s, "seconds": seconds, "said": said, "then": back}
            self.report({"what": "stop", **row})

    async def _let_run_again(self) -> None:
        """End what the server had begun, and take the engine up without another start."""
        self.watcher.send_signal(signal.SIGCONT)
        await asyncio.sleep(1.0)
        client = HttpClient(self.engine._server.url)
        if self.args.way.startswith("vllm") and self.args.device == "cuda":
            with suppress(StreamError):  # refused where no update had begun
                await client.post("/finish_weight_update", timeout_s=30.0)
        await client.close()
        self.engine._crash, self.engine._paused = None, False
        self.engine.receiver.reset(gone=False)
        self.engine._open.set()

    async def stop_for_good(self) -> None:
        """Stop it once more, restart the engine as a run does it, and give it a version."""
        pid = self.engine._child._peers[0].pid if self.inside else self.engine._server.pid
        self.watcher.pids = [one for one in find_family(pid)[1:] if not self.inside or "VLLM" in read_title(one)]
        self.watcher.send_signal(signal.SIGSTOP)
        store = self.make_store(on_card=True)
        begin, said = time.perf_counter(), ""
        try:
            await self.update_once(store)
        except HeadwayError as error:
            said = str(error)[:300]
        failed = time.perf_counter()
        self.report({"what": "stopped for good", "seconds": failed - begin, "said": said})
        if not self.inside:
            self.engine._settings = replace(self.engine._settings, call_s=30.0, load_s=60.0)
        await self.engine.restart()
        await measure_engine(self.engine, store, self.tensors, self.version + 1, 1)
        self.report({"what": "back and seeded", "seconds": time.perf_counter() - failed})


def read_used_gb(device: str) -> float:
    """Return the memory of the card that anybody uses."""
    if device == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def read_title(pid: int) -> str:
    """Return the name that a process has given itself."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def find_family(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *(one for word in words for one in find_family(int(word)))]


def main() -> None:
    """Try one server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("way", choices=[way for way in WAYS if way != "native"])
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--times", type=int, default=5, help="updates of each kind")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--sharp", type=float, default=9.0)
    parser.add_argument("--deadline-s", type=float, default=3.0, help="of each phase in which it is stopped")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each thing that is tried")
    parser.add_argument("--stops", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sleeps", action="store_true", help="try sleeping, and nothing else")
    parser.add_argument("--share", type=float, default=0.06, help="of the card's memory")
    parser.add_argument("--python", default="", help="interpreter that has vLLM or SGLang; empty: this one")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.prompts, args.length, args.steps = 8, args.tokens + 64, 1
    args.transport, args.learning_rate, args.vocabulary, args.mean_length = "auto", 1e-6, 0, 0
    asyncio.run(Session(args, Path(tempfile.mkdtemp(prefix="headway-servers-"))).run())


if __name__ == "__main__":
    main()
