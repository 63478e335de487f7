"""Engines over fake servers, and versions of a table as they travel. Nothing here needs torch."""

from __future__ import annotations

import array
import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from headway.engines.base import Engine, Request
from headway.engines.servers.server_dialect import ServerDialect
from headway.engines.servers.server_engine import ServerEngine
from headway.engines.servers.server_process import ReportEnd, ServerHandle, ServerSettings
from headway.engines.servers.sglang_dialect import SglangDialect
from headway.engines.servers.vllm_dialect import VllmDialect
from headway.errors import TransferError
from headway.types import SamplingParams
from headway.weights.base import Bucket, Manifest, TensorEntry, WeightReceiver, compute_checksum
from tests.engine_servers.fake_decoding import TENSOR, Decoder, Table, counting_rows, random_rows
from tests.engine_servers.fake_servers import KINDS, FakeServer

SIZE = 64
FAST = ServerSettings(slots=8, context_tokens=256, call_s=5.0, load_s=5.0, start_s=10.0, silence_s=10.0, drain_s=1.0)
DIALECTS: dict[str, type[Any]] = {"vllm": VllmDialect, "sglang": SglangDialect}


def version_of(rows: list[list[float]], version: int, name: str = TENSOR) -> tuple[Manifest, list[Bucket]]:
    """A table and a scalar beside it, in buckets of 4000 bytes."""
    data = array.array("f", itertools.chain(*rows)).tobytes() + array.array("f", [float(version)]).tobytes()
    parts = [data[start : start + 4000] for start in range(0, len(data), 4000)]
    manifest = Manifest(
        version=version,
        tensors=(
            TensorEntry(name=name, shape=(len(rows), len(rows[0])), dtype="float32"),
            TensorEntry(name="version", shape=(), dtype="float32"),
        ),
        checksums=tuple(compute_checksum(part) for part in parts),
        total_bytes=len(data),
    )
    sums = manifest.checksums
    return manifest, [Bucket(version=version, index=n, checksum=sums[n], payload=part) for n, part in enumerate(parts)]


async def serve(engine: Engine, version: int, rows: list[list[float]] | None = None, name: str = TENSOR) -> None:
    """Load and flip."""
    manifest, buckets = version_of(rows or counting_rows(SIZE), version, name)
    await engine.receiver.begin(manifest)
    for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()


def request(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), *, count: int = 100, **params: Any) -> Request:
    return Request(request_id=name, session=name, prompt=prompt, params=SamplingParams(max_new_tokens=count, **params))


class TableSource:
    """Holds some versions of the counting table."""

    def __init__(self, *versions: int) -> None:
        self._versions = versions

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        if version not in self._versions:
            raise TransferError(f"version {version} is not held")
        manifest, buckets = version_of(counting_rows(SIZE), version)
        return manifest, _each(buckets)


async def _each(buckets: list[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket


class HandOver:
    """A transport inside one process."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        return bucket

    def close(self) -> None: ...


class Site:
    """Stand-ins of one kind and engines over them, all gone at the end."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind, self._options = kind, options
        self.servers: dict[str, FakeServer] = {}
        self.engines: list[ServerEngine] = []
        self._directory = tempfile.TemporaryDirectory()
        self.root = Path(self._directory.name)

    def engine(
        self,
        name: str = "engine/0",
        settings: ServerSettings = FAST,
        dialect: ServerDialect | None = None,
        **options: Any,
    ) -> ServerEngine:
        """Over a fake server of its own, which starts when the engine does."""
        raw = self._options.get("raw", False)
        standin = KINDS[self.kind](
            lambda: Decoder(Table(random_rows(SIZE)), raw=raw), dev_mode=self._options.get("dev_mode", True)
        )
        self.servers[name] = standin
        return self.over(Beginning(standin), name, settings, dialect, **options)

    def over(
        self,
        server: ServerHandle,
        name: str,
        settings: ServerSettings,
        dialect: ServerDialect | None = None,
        **options: Any,
    ) -> ServerEngine:
        options = {"end_tokens": [43], "root": self.root / name, **options}
        engine = ServerEngine(name, server, dialect or DIALECTS[self.kind](), settings, **options)
        self.engines.append(engine)
        return engine

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
        for server in self.servers.values():
            await server.stop()
        self._directory.cleanup()


class Beginning(ServerHandle):
    """An external server whose owner starts it when it is first looked for, and again when it has crashed."""

    def __init__(self, standin: FakeServer) -> None:
        super().__init__("")
        self._standin = standin
        self._seen: Any = None

    async def start(self, on_end: ReportEnd) -> None:
        if self._seen is not self._standin.decoder:
            await self._standin.start()
        self._seen, self.url = self._standin.decoder, self._standin.url


def run(scenario: Coroutine[Any, Any, None], timeout_s: float = 120.0) -> None:
    """On a loop of its own, never forever."""

    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await scenario

    asyncio.run(bounded())
