"""vLLM's OpenAI server with its development endpoints (`VLLM_SERVER_DEV_MODE=1`).

Requests are `/v1/completions` with token ids for a prompt; `return_token_ids` and `logprobs: 0` bring the ids and the
log-probabilities of what was drawn in every event. Everything that a checkpoint's `generation_config` could change is
said in each request, and its own end of text is ignored: what ends an answer is in `stop_token_ids`. No `seed` is sent:
with one, vLLM on a CPU has been seen to die.

Log-probabilities are those of `--logprobs-mode`. Its default, `raw_logprobs`, is before the temperature;
`processed_logprobs` is after temperature, top-k, top-p and min-p: those of what was drawn from, as our own engine says
them. Servers that we launch have it, others are asked before they are used.

A flip is `/pause?mode=abort`, which hands out what running requests have, `/collective_rpc` with `reload_weights`,
`/reset_prefix_cache`, `/update_weight_version`, `/resume`. `cache_salt` keeps prefixes of different weights apart.

Servers that we launch load with a method of our own (`engines/vllm/worker_path`): on a CPU `reload_weights` leaves the output layer
as it was where that is tied to the embedding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.engines.servers.http_client import HttpClient, ServerLostError
from headway.engines.servers.server_dialect import ServerChunk, ServerRequest
from headway.engines.servers.settings import (
    LaunchSettings,
    make_flags,
    make_vllm_environment,
    make_vllm_options,
)
from headway.types import FinishReason, SamplingParams

_WORKER_PATH = Path(__file__).parents[1] / "vllm" / "worker_path"
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class VllmDialect:
    """A `Dialect`. `ours`: the server is one that `command` has started."""

    name = "vllm"
    package = "vllm"
    path = "/v1/completions"
    hint = "VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs, vLLM 0.32 or newer"
    probe = SamplingParams(max_new_tokens=8, top_k=1)
    """Temperatures above 2 are refused; of one token that can be drawn the log-probability is 0."""

    def __init__(self, *, ours: bool = False) -> None:
        self._model, self._ours = "", ours

    async def greet(self, link: HttpClient, timeout_s: float) -> None:
        models = await link.get("/v1/models", timeout_s=timeout_s)
        self._model = models["data"][0]["id"]
        await link.get("/is_paused", timeout_s=timeout_s)
        await self.label(link, timeout_s)

    def body(self, asked: ServerRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "request_id": asked.key,
            "prompt": list(asked.prompt),
            "max_tokens": asked.count,
            **asked.drawing(),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": asked.label,
            "stream": True,
        }

    def read(self, event: Mapping[str, Any], seen: int) -> ServerChunk:
        if "error" in event:
            raise ServerLostError(f"vLLM: {event['error']}")
        if not event.get("choices"):
            return ServerChunk()
        choice = event["choices"][0]
        tokens = choice.get("token_ids") or ()
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        if len(tokens) != len(logps):
            raise ServerLostError(f"vLLM: {len(tokens)} tokens with {len(logps)} log-probabilities")
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _FINISH:
            raise ServerLostError(f"vLLM: a request ended by {reason!r}")
        return ServerChunk(tokens=tokens, logps=logps, finish=_FINISH[reason] if reason is not None else None)

    async def abort(self, link: HttpClient, key: str, timeout_s: float) -> None:
        await link.post("/abort_requests", {"request_ids": [f"cmpl-{key}-0"]}, timeout_s=timeout_s)

    async def stop(self, link: HttpClient, timeout_s: float) -> None:
        await link.post("/pause?mode=abort", timeout_s=timeout_s)

    async def hold(self, link: HttpClient, timeout_s: float) -> None:
        """`stop` has done it."""

    async def go_on(self, link: HttpClient, timeout_s: float) -> None:
        await link.post("/resume", timeout_s=timeout_s)

    async def load(self, link: HttpClient, directory: Path, label: str, timeout_s: float) -> None:
        method = "headway_load" if self._ours else "reload_weights"
        order = {"method": method, "kwargs": {"weights_path": str(directory)}, "timeout": timeout_s}
        await link.post("/collective_rpc", order, timeout_s=timeout_s)
        answer = await link.post("/reset_prefix_cache", timeout_s=timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerLostError("vLLM kept its prefix cache: something still runs")
        await link.post("/update_weight_version", {"new_version": label}, timeout_s=timeout_s)

    async def label(self, link: HttpClient, timeout_s: float) -> str:
        return str((await link.get("/weight_info", timeout_s=timeout_s))["weight_version"])

    def command(self, launch: LaunchSettings) -> tuple[list[str], dict[str, str]]:
        options = {
            **make_vllm_options(launch),
            "host": "127.0.0.1",
            "port": launch.port,
            "worker_extension_cls": "headway_worker.WeightReloadExtension",
            **launch.further(),
        }
        line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *make_flags(options)]
        path = os.pathsep.join(filter(None, [str(_WORKER_PATH), os.environ.get("PYTHONPATH", "")]))
        return line, {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path, **make_vllm_environment(launch)}
