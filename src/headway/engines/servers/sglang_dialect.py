"""The protocol of SGLang's own HTTP API. docs/servers.md has a table of its calls beside those of vLLM.

An event's `output_token_logprobs` holds pairs of log-probability and token: all of them so far, or only the new ones
(`--incremental-streaming-output`); the number of tokens beside them says which. With top-k, top-p or min-p the reported
behaviour policy is wider than the one that was drawn from, other than with vLLM and with the native engine.

Its tokenizer's end of text ends an answer beside the tokens that are asked for: `ignore_eos` would ignore those, too.
An update aborts before it pauses, because a pause looks for running requests once a second only.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.engines.servers.http_client import HttpClient, ServerRefused
from headway.engines.servers.server_process import LaunchSettings, make_flags
from headway.engines.streaming_engine import FINISH_REASONS, BackendLost, StreamChunk, StreamRequest
from headway.types import SamplingParams

_STREAM_INTERVAL = 8
"""Tokens between two events of a launched server: each may repeat all log-probabilities before it."""


class SglangDialect:
    """A `ServerDialect`."""

    name = "sglang"
    path = "/generate"
    hint = "SGLang 0.5.6 or newer, without SGLANG_RETURN_ORIGINAL_LOGPROB"
    probe = SamplingParams(max_new_tokens=8, temperature=1e4)
    """So hot that all tokens are equally likely; a top-k of one would not show in SGLang's log-probabilities."""

    async def connect(self, client: HttpClient, timeout_s: float) -> None:
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
        order = {"model_path": str(directory), "weight_version": label, "flush_cache": True}
        answer = await client.post("/update_weights_from_disk", order, timeout_s=timeout_s)
        if not answer.get("success"):
            raise BackendLost(f"SGLang does not load {directory}: {answer.get('message')}")
        await client.post("/flush_cache", timeout_s=timeout_s)

    async def read_label(self, client: HttpClient, timeout_s: float) -> str:
        try:
            info = await client.get("/model_info", timeout_s=timeout_s)
        except ServerRefused as error:
            if error.status != 404:
                raise
            info = await client.get("/get_model_info", timeout_s=timeout_s)  # its name in older versions
        return str(info["weight_version"])

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
            **dict(launch.extra),
        }
        command = [sys.executable, "-m", "sglang.launch_server", *make_flags(options)]
        return command, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
