"""The protocol of SGLang's own HTTP API. docs/servers.md has a table of its calls beside those of vLLM.

An event's `output_token_logprobs` holds pairs of log-probability and token: all of them so far, or only the new ones
(`--incremental-streaming-output`); the number of tokens beside them says which. With top-k, top-p or min-p the reported
behaviour policy is wider than the one that was drawn from, other than with vLLM and with the native engine.

Its tokenizer's end of text ends an answer beside the tokens that are asked for: `ignore_eos` would ignore those, too.
An update aborts before it pauses, because a pause looks for running requests once a second only. It does not ask the
server to empty its cache in the same call: a server that cannot, because something runs, ends itself. Weights in memory
of the server's GPU are named tensors that torch rebuilds there (`/update_weights_from_tensor`).
"""

import asyncio
import base64
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.server_versions import check_server_version
from headway.engines.servers.http_client import HttpClient, ServerRefused, name_phase
from headway.engines.servers.server_process import LaunchSettings, make_flags
from headway.engines.streaming_engine import FINISH_REASONS, BackendLost, StreamChunk, StreamRequest
from headway.types import SamplingParams
from headway.weights.base import Manifest
from headway.weights.device_memory import make_tensor_arguments
from headway.weights.shared_version import VersionBuffer
from headway.weights.weight_layout import compute_layout, get_dtype

_STREAM_INTERVAL = 8
"""Tokens between two events of a launched server: each may repeat all log-probabilities before it."""
_IDLE_POLL_S = 0.01
_MEMORY = ["weights", "kv_cache"]
"""What a server frees while it sleeps."""


class SglangDialect:
    """A `ServerDialect`."""

    name = "sglang"
    path = "/generate"
    hint = "SGLang 0.5.6 or newer, without SGLANG_RETURN_ORIGINAL_LOGPROB"
    probe = SamplingParams(max_new_tokens=8, temperature=1e4)
    """So hot that all tokens are equally likely; a top-k of one would not show in SGLang's log-probabilities."""

    def __init__(self, *, tensor_parallel: int = 1) -> None:
        self._workers = tensor_parallel

    async def connect(self, client: HttpClient, timeout_s: float) -> None:
        info = await self._get(client, "/server_info", "/get_server_info", timeout_s)
        check_server_version("sglang", str(info.get("version", "")))
        self._workers = int(info.get("tp_size", self._workers))
        await self.read_label(client, timeout_s)

    def make_body(self, request: StreamRequest) -> dict[str, Any]:
        return {
            "rid": request.key,
            "input_ids": list(request.prompt),
            "sampling_params": {"max_new_tokens": request.max_tokens, **request.sampling_arguments()},
            "return_logprob": True,
            "extra_key": request.label,
            "stream": True,
        }

    def parse_event(self, event: Mapping[str, Any], seen: int) -> StreamChunk:
        if "error" in event:
            raise BackendLost(f"SGLang: {event['error']}")
        meta = event["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        total = meta.get("completion_tokens", len(pairs))
        if len(pairs) == total:
            pairs = pairs[seen:]
        elif seen + len(pairs) != total and pairs:
            raise BackendLost(f"SGLang: {len(pairs)} log-probabilities after {seen} tokens, and {total} tokens in all")
        finish = meta.get("finish_reason")
        reason = finish["type"] if finish is not None else None
        if reason is not None and reason not in FINISH_REASONS:
            raise BackendLost(f"SGLang: a request ended by {reason!r}")
        label = meta.get("weight_version")
        return StreamChunk(
            tokens=[int(pair[1]) for pair in pairs],
            logps=[float(pair[0]) for pair in pairs],
            finish=FINISH_REASONS[reason] if reason is not None else None,
            labels=() if label is None else (label,),
        )

    async def abort(self, client: HttpClient, key: str, timeout_s: float) -> None:
        await client.post("/abort_request", {"rid": key}, timeout_s=timeout_s)

    async def end_requests(self, client: HttpClient, timeout_s: float) -> None:
        await client.post("/abort_request", {"abort_all": True}, timeout_s=timeout_s)

    async def hold(self, client: HttpClient, timeout_s: float) -> None:
        await client.post("/pause_generation", {"mode": "abort"}, timeout_s=timeout_s)

    async def release(self, client: HttpClient, timeout_s: float) -> None:
        await client.post("/continue_generation", {}, timeout_s=timeout_s)

    async def load(self, client: HttpClient, directory: Path, label: str, timeout_s: float) -> None:
        order = {"model_path": str(directory), "weight_version": label, "flush_cache": False}
        await _update(client, "loading files", "/update_weights_from_disk", order, str(directory), timeout_s)

    async def load_shared(
        self, client: HttpClient, manifest: Manifest, buffer: VersionBuffer, label: str, timeout_s: float
    ) -> None:
        tensors = [pickle_named_tensors(manifest, buffer)] * self._workers
        order = {"serialized_named_tensors": tensors, "weight_version": label, "flush_cache": False}
        what = f"version {manifest.version}"
        await _update(client, "update", "/update_weights_from_tensor", order, what, timeout_s)

    async def sleep(self, client: HttpClient, timeout_s: float) -> None:
        await _wait_until_idle(client, timeout_s)
        await client.post("/release_memory_occupation", {"tags": _MEMORY}, timeout_s=timeout_s)

    async def wake(self, client: HttpClient, timeout_s: float) -> None:
        await client.post("/resume_memory_occupation", {"tags": _MEMORY}, timeout_s=timeout_s)

    async def read_label(self, client: HttpClient, timeout_s: float) -> str:
        return str((await self._get(client, "/model_info", "/get_model_info", timeout_s))["weight_version"])

    async def _get(self, client: HttpClient, path: str, older: str, timeout_s: float) -> Any:
        """Return the answer at `path`, which older versions call otherwise."""
        try:
            return await client.get(path, timeout_s=timeout_s)
        except ServerRefused as error:
            if error.status != 404:
                raise
            return await client.get(older, timeout_s=timeout_s)

    def make_command(self, launch: LaunchSettings) -> tuple[list[str], dict[str, str]]:
        options = {
            "model-path": launch.model,
            "host": "127.0.0.1",
            "port": launch.port,
            "dtype": launch.dtype,
            "random-seed": launch.seed,
            "max-running-requests": launch.slots,
            "context-length": launch.context_tokens,
            "tp-size": launch.tensor_parallel,
            "mem-fraction-static": launch.memory_share,
            "sampling-defaults": "openai",
            "stream-interval": _STREAM_INTERVAL,
            "enable-memory-saver": launch.sleeps,
            **dict(launch.extra),
        }
        command = [sys.executable, "-m", "sglang.launch_server", *make_flags(options)]
        return command, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}


@dataclass(frozen=True, slots=True)
class _TensorElsewhere:
    """Is a tensor in the process that unpickles it."""

    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor, self.arguments


def pickle_named_tensors(manifest: Manifest, buffer: VersionBuffer) -> str:
    """Return names and tensors of a version for one worker, as SGLang's serializer would write them, in base 64."""
    named = []
    for extent in compute_layout(manifest.tensors)[0]:
        dtype = get_dtype(extent.entry)
        first = (buffer.start + extent.start) // dtype.itemsize
        arguments = make_tensor_arguments(buffer.handle, extent.entry.shape, first, dtype)
        named.append((extent.entry.name, _TensorElsewhere(arguments)))
    return base64.b64encode(pickle.dumps(named)).decode("ascii")


async def _update(
    client: HttpClient, phase: str, path: str, order: dict[str, Any], what: str, timeout_s: float
) -> None:
    """Let the server take weights and forget the KV of others. Raises `BackendLost` with the server's own words."""
    with name_phase("pause"):
        await _wait_until_idle(client, timeout_s)
    with name_phase(phase):
        answer = await client.post(path, order, timeout_s=timeout_s)
        if not answer.get("success"):
            raise BackendLost(f"SGLang does not load {what}: {answer.get('message')}")
    with name_phase("cache"):
        await client.post("/flush_cache", timeout_s=timeout_s)


async def _wait_until_idle(client: HttpClient, timeout_s: float) -> None:
    """Wait until the scheduler of a paused server has ended all requests, which shows in that it empties its cache.

    A request whose connection was closed runs on for some steps. An update would change the weights under it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            await client.get("/flush_cache", timeout_s=max(deadline - loop.time(), _IDLE_POLL_S))
            return
        except ServerRefused:
            if loop.time() > deadline:
                raise
            await asyncio.sleep(_IDLE_POLL_S)
