"""How fast a version of the weights reaches an engine, by each way, against a plain copy of the same bytes.

    python benchmarks/weights.py                      one table, about half a minute
    python benchmarks/weights.py --mb 64 256 1024 --bucket-mb 16 --repeats 3 --ray

An update is everything from `gather` to `flip`: checksums counted at the source, the way, the copy into the spare
tensors, checksums counted there, the switch. What a trainer does between two steps (`publish`) is a column of its own.
Each row is the best of its repeats, after two that are not counted. All ways end in a `DoubleBufferedReceiver` of
the same process, except the broadcast and CUDA IPC: their engines are processes. `delta` changes 1 % of the elements,
in one stretch. `--ray` adds the object store of a Ray that is started for it; with a GPU there is a row for CUDA IPC.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.monitor.resource_usage import describe_machine
from headway.weights.base import Bucket, Manifest, WeightReceiver, WeightSource, WeightTransport
from headway.weights.broadcast_transport import BroadcastInbox, BroadcastTransport
from headway.weights.delta_transport import DeltaTransport
from headway.weights.device_memory import CudaMemory, IpcArena, IpcPayloadReader
from headway.weights.disk_transport import DiskStore, DiskTransport, VersionDirectory
from headway.weights.host_transports import InProcessTransport, ObjectTransport, SharedMemoryTransport
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import Arena, ObjectArena, SharedArena, WeightStore

_MB = 1 << 20
_LAYERS = 16
_CHANGED = 0.01


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    way: str
    publish_s: float
    update_s: float
    cpu_s: float
    """Of an update, in this process and in those of the engines: what other work on the machine changes least."""
    moved: int
    """Bytes that had to travel to one engine."""


class Version:
    """The weights of a trainer: matrices of one size, in bf16, as they travel."""

    def __init__(self, megabytes: int) -> None:
        self.size = megabytes * _MB // _LAYERS * _LAYERS
        count = self.size // _LAYERS // 2
        self.tensors: dict[str, Tensor] = {f"layers.{n}.weight": torch.randn(count).bfloat16() for n in range(_LAYERS)}
        self._number = 0

    def move(self, device: str) -> None:
        """Where the trainer has them."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}

    def train(self, share: float) -> int:
        """Change the first `share` of the elements; the number of the version that this makes."""
        left = int(self.size / 2 * share)
        for tensor in self.tensors.values():
            changed = min(left, tensor.numel())
            tensor[:changed].neg_()
            left -= changed
        self._number += 1
        return self._number


async def ignored(version: int, tensors: Mapping[str, Tensor]) -> None:
    """An engine that computes nothing."""


async def updated(source: WeightSource, transport: WeightTransport, receiver: WeightReceiver, version: int) -> None:
    """One update, as a run does it."""
    manifest, buckets = await source.gather(version)
    await receiver.begin(manifest)
    async for bucket in buckets:
        await receiver.load(await transport.send(bucket, receiver))
    await receiver.flip()


class Bench:
    """One size, one number of repeats, every way."""

    def __init__(self, version: Version, bucket_mb: float, repeats: int, directory: Path) -> None:
        self.version, self.bucket_mb, self.repeats, self.directory = version, bucket_mb, repeats, directory

    def copied(self) -> Row:
        """The same bytes by `copy_`."""
        source = [tensor.view(torch.uint8) for tensor in self.version.tensors.values()]
        target = [torch.empty_like(tensor) for tensor in source]

        def once() -> None:
            for one, other in zip(target, source, strict=True):
                one.copy_(other)

        once()
        wall_s, cpu_s = zip(*(_timed(once) for _ in range(self.repeats)), strict=True)
        return Row("plain copy", 0.0, min(wall_s), min(cpu_s), self.version.size)

    def updates(
        self,
        way: str,
        transport: WeightTransport,
        *,
        arena: Arena | None = None,
        around: Callable[[WeightStore], WeightSource] = lambda store: store,
        receivers: list[Any] | None = None,
        share: float = 1.0,
    ) -> Row:
        """Publish and update, again and again."""
        with ExitStack() as stack:
            store = WeightStore(bucket_mb=self.bucket_mb, wire_dtype=None, arena=arena)
            stack.callback(store.close)
            stack.callback(getattr(transport, "close", lambda: None))
            engines = receivers or [DoubleBufferedReceiver(ignored)]
            source, publish_s, update_s, cpu_s = around(store), [], [], []

            async def all_of_them(number: int) -> None:
                await asyncio.gather(*(updated(source, transport, one, number) for one in engines))

            for repeat in range(self.repeats + 2):
                number = self.version.train(share if repeat > 1 else 1.0)
                before = getattr(transport, "sent_bytes", 0)
                publish_s.append(_timed(lambda n=number: store.publish(n, self.version.tensors))[0])  # type: ignore[misc]
                there_s = -sum(getattr(one, "cpu_s", 0.0) for one in engines)
                wall, here_s = _timed(lambda n=number: asyncio.run(all_of_them(n)))  # type: ignore[misc]
                there_s += sum(getattr(one, "cpu_s", 0.0) for one in engines)
                update_s.append(wall)
                cpu_s.append(here_s + there_s)
            moved = getattr(transport, "sent_bytes", self.version.size) - before
            return Row(way, min(publish_s[2:]), min(update_s[2:]), min(cpu_s[2:]), moved)

    def broadcast(self, engines: int) -> Row:
        """To engines in processes of their own, over the loopback interface."""
        transport = BroadcastTransport()
        remotes = [Remote(f"engine/{number}", transport.port) for number in range(engines)]
        try:
            return self.updates(f"gloo broadcast to {engines}", transport, receivers=list(remotes))
        finally:
            for remote in remotes:
                remote.close()

    def read_on_a_gpu(self) -> Row:
        """By an engine that is a process on the same card."""
        self.version.move("cuda")
        remote = Remote("engine/0", 0)
        try:
            arena = IpcArena(CudaMemory("cuda"))
            return self.updates("CUDA IPC, one card", InProcessTransport(), arena=arena, receivers=[remote])
        finally:
            remote.close()
            self.version.move("cpu")

    def stored(self) -> Row:
        """Through the object store of a Ray of its own."""
        import ray

        room = max(5 * self.version.size, 256 * _MB)
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=room)
        try:
            return self.updates("Ray's object store", ObjectTransport(), arena=ObjectArena())
        finally:
            ray.shutdown()

    def rows(self, *, ray: bool) -> list[Row]:
        """Everything that this machine has."""
        more = [self.stored] if ray else []
        more += [self.read_on_a_gpu] if torch.cuda.is_available() else []
        return [*self._rows(), *(row() for row in more)]

    def _rows(self) -> list[Row]:
        directory = VersionDirectory(self.directory, shard_mb=self.bucket_mb)
        return [
            self.copied(),
            self.updates("heap, in one process", InProcessTransport()),
            self.updates("shared memory, published there", SharedMemoryTransport(), arena=SharedArena()),
            self.updates("shared memory, copied there", SharedMemoryTransport()),
            self.updates("disk", DiskTransport(), around=lambda store: DiskStore(store, directory)),
            self.broadcast(1),
            self.broadcast(2),
            self.updates("delta 1 %, heap", DeltaTransport(InProcessTransport()), share=_CHANGED),
            self.updates(
                "delta 1 %, shared memory", DeltaTransport(SharedMemoryTransport()), arena=SharedArena(), share=_CHANGED
            ),
            self.updates(
                "delta 1 %, disk",
                DeltaTransport(DiskTransport()),
                around=lambda store: DiskStore(store, directory),
                share=_CHANGED,
            ),
        ]


class Remote:
    """The receiver of an engine in another process."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.version, self.cpu_s = name, -1, 0.0
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_engine, args=(name, port, theirs), daemon=True)
        self._process.start()
        self._pipe.recv()

    async def begin(self, manifest: Manifest) -> None:
        await self._ask("begin", manifest)

    async def load(self, bucket: Bucket) -> None:
        await self._ask("load", bucket)

    async def flip(self) -> None:
        self.version, self.cpu_s = await self._ask("flip")

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()

    async def _ask(self, *call: Any) -> Any:
        self._pipe.send(call)
        return await asyncio.to_thread(self._pipe.recv)


def _engine(name: str, port: int, pipe: Any) -> None:
    """With a port, one that weights are broadcast to; else one that reads them on the GPU."""
    torch.set_num_threads(1)
    landing = BroadcastInbox(name, "127.0.0.1", port) if port else IpcPayloadReader(CudaMemory("cuda"))
    receiver = DoubleBufferedReceiver(ignored, device="cpu" if port else "cuda", open_payload=landing.open)
    pipe.send("ready")
    with asyncio.Runner() as runner:
        while (call := pipe.recv()) is not None:
            runner.run(getattr(receiver, call[0])(*call[1:]))
            pipe.send((receiver.version, time.process_time()))
    landing.close()


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and seconds of CPU."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began_s, time.process_time() - cpu_s


def table(rows: list[Row], size: int) -> str:
    """Markdown. GB/s are of the whole version: what a delta leaves out counts as updated."""
    lines = [
        "| way | publish, s | update, s | GB/s | of a plain copy | CPU s | GB per CPU s | bytes to an engine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain_s = rows[0].update_s
    for row in rows:
        publish = f"{row.publish_s:.3f}" if row.publish_s else "–"
        lines.append(
            f"| {row.way} | {publish} | {row.update_s:.3f} | {size / row.update_s / 1e9:.2f} | "
            f"{plain_s / row.update_s:.0%} | {row.cpu_s:.3f} | {size / row.cpu_s / 1e9:.2f} | "
            f"{row.moved / 1e6:,.0f} MB |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--mb", type=int, nargs="+", default=[512], help="sizes of a version")
    parser.add_argument("--bucket-mb", type=float, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the disk is measured; left out, a temporary one")
    parser.add_argument("--ray", action="store_true", help="the object store of Ray, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"buckets of {args.bucket_mb:g} MB, {describe_machine()}, torch {torch.__version__}")
    for megabytes in args.mb:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            version = Version(megabytes)
            rows = Bench(version, args.bucket_mb, args.repeats, Path(directory)).rows(ray=args.ray)
        print(f"\n{megabytes} MB\n\n{table(rows, version.size)}", flush=True)


if __name__ == "__main__":
    main()
