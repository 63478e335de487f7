"""SGLang's own HTTP API.

Requests are `/generate` with `input_ids` and `return_logprob`. An event's `output_token_logprobs` holds pairs of
log-probability and token: all of them so far, or only the new ones (`--incremental-streaming-output`); the number of
tokens that stands beside them says which. `meta_info.weight_version` says in every event under which weights.

Log-probabilities are after the temperature, unless the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB`; that is found
out before it is used. They are before top-k, top-p and min-p: with one of these, the behaviour policy is said to be
wider than what was drawn from, other than with vLLM and with our own engine.

Its tokenizer's end of text ends an answer beside the tokens that are asked for: `ignore_eos` would ignore those, too.

A flip is `/abort_request` for all, which hands out what running requests have, `/pause_generation`,
`/update_weights_from_disk` with a label and a flush of the cache, `/continue_generation`. The abort goes first because
a pause looks for running requests once a second only. `extra_key` keeps prefixes of different weights apart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.engines.servers.http_client import HttpClient, ServerLostError, ServerRefusedError
from headway.engines.servers.server_dialect import ServerChunk, ServerRequest
from headway.engines.servers.settings import LaunchSettings, make_flags
from headway.types import FinishReason, SamplingParams

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_EVERY = 8
"""Tokens between two events of a server of ours: each may repeat all log-probabilities before it."""


class SglangDialect:
    """A `Dialect`."""

    name = "sglang"
    package = "sglang"
    path = "/generate"
    hint = "SGLang 0.5.6 or newer, without SGLANG_RETURN_ORIGINAL_LOGPROB"
    probe = SamplingParams(max_new_tokens=8, temperature=1e4)
    """So hot that all tokens are alike; a top-k of one would not show in them."""

    async def greet(self, link: HttpClient, timeout_s: float) -> None:
        await self.label(link, timeout_s)

    def body(self, asked: ServerRequest) -> dict[str, Any]:
        return {
            "rid": asked.key,
            "input_ids": list(asked.prompt),
            "sampling_params": {
                "max_new_tokens": asked.count,
                **asked.drawing(),
            },
            "return_logprob": True,
            "extra_key": asked.label,
            "stream": True,
        }

    def read(self, event: Mapping[str, Any], seen: int) -> ServerChunk:
        if "error" in event:
            raise ServerLostError(f"SGLang: {event['error']}")
        about = event["meta_info"]
        pairs = about.get("output_token_logprobs") or []
        total = about.get("completion_tokens", len(pairs))
        if len(pairs) == total:
            pairs = pairs[seen:]
        elif seen + len(pairs) != total and pairs:
            raise ServerLostError(
                f"SGLang: {len(pairs)} log-probabilities after {seen} tokens, and {total} tokens in all"
            )
        reason = about.get("finish_reason")
        kind = reason["type"] if reason is not None else None
        if kind is not None and kind not in _FINISH:
            raise ServerLostError(f"SGLang: a request ended by {kind!r}")
        return ServerChunk(
            tokens=[int(pair[1]) for pair in pairs],
            logps=[float(pair[0]) for pair in pairs],
            finish=_FINISH[kind] if kind is not None else None,
            label=about.get("weight_version"),
        )

    async def abort(self, link: HttpClient, key: str, timeout_s: float) -> None:
        await link.post("/abort_request", {"rid": key}, timeout_s=timeout_s)

    async def stop(self, link: HttpClient, timeout_s: float) -> None:
        await link.post("/abort_request", {"abort_all": True}, timeout_s=timeout_s)

    async def hold(self, link: HttpClient, timeout_s: float) -> None:
        await link.post("/pause_generation", {"mode": "abort"}, timeout_s=timeout_s)

    async def go_on(self, link: HttpClient, timeout_s: float) -> None:
        await link.post("/continue_generation", {}, timeout_s=timeout_s)

    async def load(self, link: HttpClient, directory: Path, label: str, timeout_s: float) -> None:
        order = {"model_path": str(directory), "weight_version": label, "flush_cache": True}
        answer = await link.post("/update_weights_from_disk", order, timeout_s=timeout_s)
        if not answer.get("success"):
            raise ServerLostError(f"SGLang does not load {directory}: {answer.get('message')}")
        await link.post("/flush_cache", timeout_s=timeout_s)

    async def label(self, link: HttpClient, timeout_s: float) -> str:
        try:
            about = await link.get("/model_info", timeout_s=timeout_s)
        except ServerRefusedError as error:
            if error.status != 404:
                raise
            about = await link.get("/get_model_info", timeout_s=timeout_s)  # its name before
        return str(about["weight_version"])

    def command(self, launch: LaunchSettings) -> tuple[list[str], dict[str, str]]:
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
            "stream-interval": _EVERY,
            **dict(launch.extra),
        }
        return [sys.executable, "-m", "sglang.launch_server", *make_flags(options)], {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"
        }
