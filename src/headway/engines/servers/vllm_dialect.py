"""The protocol of vLLM's OpenAI server with its development endpoints (`VLLM_SERVER_DEV_MODE=1`).

docs/servers.md has a table of its calls, and what the real vLLM does otherwise than one would expect. Everything that a
checkpoint's `generation_config` could change is set in each request, and its own end of text is ignored: what ends an
answer is in `stop_token_ids`. No `seed` is sent: with one, vLLM on a CPU has been seen to die.

Weights in memory of the server's GPU go through vLLM's own weight transfer (`--weight-transfer-config`, back end
`ipc`): its phases are init, start, update and finish. Up to 0.27 an update says how its bytes are packed, from 0.28 on
the init does; the label of weights is vLLM's own from 0.28 on, before that our extension keeps it in the worker.

Servers that a run launches have `--logprobs-mode processed_logprobs`, others are checked before they are used. They
load directories with `WeightReloadExtension` (`engines/vllm/worker_path`): on a CPU `reload_weights` leaves the output
layer as it was where that is tied to the embedding.
"""

import base64
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.server_versions import check_server_version
from headway.engines.servers.http_client import HttpClient, name_phase
from headway.engines.servers.server_process import LaunchSettings, make_flags, make_vllm_environment, make_vllm_options
from headway.engines.streaming_engine import FINISH_REASONS, BackendLost, StreamChunk, StreamRequest
from headway.types import SamplingParams
from headway.weights.base import Manifest
from headway.weights.device_memory import make_tensor_arguments
from headway.weights.shared_version import VersionBuffer
from headway.weights.weight_layout import compute_layout

_WORKER_PATH = Path(__file__).parents[1] / "vllm" / "worker_path"
_EXTENSION, _IPC_EXTENSION = "headway_worker.WeightReloadExtension", "headway_ipc_worker.IpcExtension"
_PACKED_AT_INIT = (0, 28)
"""First version in which the init of a transfer says that tensors are packed, and which has labels of its own."""
_DISCARD = 2
"""Level of sleep at which weights are not kept: the next version brings all of them."""


class VllmDialect:
    """A `ServerDialect`. `launched`: the server was started by `make_command`."""

    name = "vllm"
    path = "/v1/completions"
    hint = "VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs, vLLM 0.28 or newer"
    probe = SamplingParams(max_new_tokens=8, top_k=1)
    """Temperatures above 2 are refused; a single token that can be drawn has the log-probability 0."""

    def __init__(self, *, launched: bool = False) -> None:
        self._model, self._launched = "", launched
        self._version: tuple[int, ...] = _PACKED_AT_INIT

    async def connect(self, client: HttpClient, timeout_s: float) -> None:
        found = await client.get("/version", timeout_s=timeout_s)
        self._version = check_server_version("vllm", str(found["version"]), launched=self._launched)
        models = await client.get("/v1/models", timeout_s=timeout_s)
        self._model = models["data"][0]["id"]
        await client.get("/is_paused", timeout_s=timeout_s)
        await self.read_label(client, timeout_s)

    def make_body(self, request: StreamRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "request_id": request.key,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            **request.sampling_arguments(),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": request.label,
            "stream": True,
        }

    def parse_event(self, event: Mapping[str, Any], seen: int) -> StreamChunk:
        if "error" in event:
            raise BackendLost(f"vLLM: {event['error']}")
        if not event.get("choices"):
            return StreamChunk()
        choice = event["choices"][0]
        tokens = choice.get("token_ids") or ()
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        if len(tokens) != len(logps):
            raise BackendLost(f"vLLM: {len(tokens)} tokens with {len(logps)} log-probabilities")
        reason = choice.get("finish_reason")
        if reason is not None and reason not in FINISH_REASONS:
            raise BackendLost(f"vLLM: a request ended by {reason!r}")
        return StreamChunk(tokens=tokens, logps=logps, finish=FINISH_REASONS[reason] if reason is not None else None)

    async def abort(self, client: HttpClient, key: str, timeout_s: float) -> None:
        await client.post("/abort_requests", {"request_ids": [f"cmpl-{key}-0"]}, timeout_s=timeout_s)

    async def end_requests(self, client: HttpClient, timeout_s: float) -> None:
        await client.post("/pause?mode=abort", timeout_s=timeout_s)

    async def hold(self, client: HttpClient, timeout_s: float) -> None:
        """Do nothing: `end_requests` has paused the server."""

    async def release(self, client: HttpClient, timeout_s: float) -> None:
        await client.post("/resume", timeout_s=timeout_s)

    async def load(self, client: HttpClient, directory: Path, label: str, timeout_s: float) -> None:
        method = "headway_load" if self._launched else "reload_weights"
        order = {"method": method, "kwargs": {"weights_path": str(directory)}, "timeout": timeout_s}
        with name_phase("loading files"):
            await client.post("/collective_rpc", order, timeout_s=timeout_s)
        await self._finish_load(client, label, timeout_s)

    async def load_shared(
        self, client: HttpClient, manifest: Manifest, buffer: VersionBuffer, label: str, timeout_s: float
    ) -> None:
        early = self._version < _PACKED_AT_INIT
        update = make_packed_update(manifest, buffer) | ({"packed": True} if early else {})
        phases: list[tuple[str, str, dict[str, Any] | None]] = [
            ("init", "/init_weight_transfer_engine", {"init_info": {} if early else {"packed": True}}),
            ("start", "/start_weight_update", None),
            ("update", "/update_weights", {"update_info": update}),
            ("finish", "/finish_weight_update", None),
        ]
        for phase, path, body in phases:
            with name_phase(phase):
                await client.post(path, body, timeout_s=timeout_s)
        await self._finish_load(client, label, timeout_s)

    async def _finish_load(self, client: HttpClient, label: str, timeout_s: float) -> None:
        with name_phase("cache"):
            answer = await client.post("/reset_prefix_cache", timeout_s=timeout_s)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise BackendLost("vLLM kept its prefix cache: something still runs")
        with name_phase("label"):
            if self._version >= _PACKED_AT_INIT:
                await client.post("/update_weight_version", {"new_version": label}, timeout_s=timeout_s)
            else:
                order = {"method": "headway_label", "kwargs": {"label": label}, "timeout": timeout_s}
                await client.post("/collective_rpc", order, timeout_s=timeout_s)

    async def sleep(self, client: HttpClient, timeout_s: float) -> None:
        await client.post(f"/sleep?level={_DISCARD}", timeout_s=timeout_s)

    async def wake(self, client: HttpClient, timeout_s: float) -> None:
        await client.post("/wake_up", timeout_s=timeout_s)

    async def read_label(self, client: HttpClient, timeout_s: float) -> str:
        if self._version >= _PACKED_AT_INIT:
            return str((await client.get("/weight_info", timeout_s=timeout_s))["weight_version"])
        order = {"method": "headway_label", "timeout": timeout_s}
        labels = {str(one) for one in (await client.post("/collective_rpc", order, timeout_s=timeout_s))["results"]}
        if len(labels) != 1:
            raise BackendLost(f"vLLM's workers have different weights: {', '.join(sorted(labels))}")
        return labels.pop()

    def make_command(self, launch: LaunchSettings) -> tuple[list[str], dict[str, str]]:
        options = {
            **make_vllm_options(launch),
            "host": "127.0.0.1",
            "port": launch.port,
            "worker_extension_cls": _IPC_EXTENSION if launch.shares_memory else _EXTENSION,
            "weight_transfer_config": '{"backend": "ipc"}' if launch.shares_memory else None,
            **launch.extra_arguments(),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *make_flags(options)]
        path = os.pathsep.join(filter(None, [str(_WORKER_PATH), os.environ.get("PYTHONPATH", "")]))
        insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if launch.shares_memory else {}  # handles are pickled
        environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path, **insecure}
        return command, environment | make_vllm_environment(launch)


def make_packed_update(manifest: Manifest, buffer: VersionBuffer) -> dict[str, Any]:
    """Return the fields by which vLLM's `ipc` back end finds the tensors of a version in one buffer."""
    extents, total = compute_layout(manifest.tensors)
    arguments = make_tensor_arguments(buffer.handle, (total,), buffer.start)
    handle = base64.b64encode(pickle.dumps({buffer.handle[0]: arguments})).decode("ascii")
    return {
        "names": [entry.name for entry in manifest.tensors],
        "dtype_names": [entry.dtype for entry in manifest.tensors],
        "shapes": [list(entry.shape) for entry in manifest.tensors],
        "tensor_sizes": [extent.size for extent in extents],
        "ipc_handles_pickled": handle,
    }
