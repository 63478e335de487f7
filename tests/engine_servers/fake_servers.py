"""Stand-ins for vLLM and SGLang: their protocols over a decoder of our own, with faults on demand.

    python -m tests.engine_servers.fake_servers vllm --model DIRECTORY --port 8000

Written from the two projects' documentation and sources, not from ours: paths, fields, spelling of ids, what a pause
does to requests that run and to those that arrive, what an abort hands out, what is refused without which option. That
of vLLM was held against a real one (tests/vllm) and does as that does.
"""

from __future__ import annotations

import array
import asyncio
import base64
import contextlib
import io
import json
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from headway.weights.shared_memory import SharedSegment
from tests.engine_servers.fake_decoding import TENSOR, Decoder, Sequence, Table, Transformer, counting_rows

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


OWN_END = 42
"""Ends an answer of a vLLM, whatever is asked for, unless it is told to ignore that."""


class FakeServer:
    """One server, of any kind. Dies and comes back on the same port; what it had learnt is gone then."""

    def __init__(self, decoder: Callable[[], Decoder], *, dev_mode: bool = True) -> None:
        self._make, self.dev_mode = decoder, dev_mode
        self.decoder = decoder()
        self.faults: list[str] = []
        """Done once each, by the next request for tokens: `500`, `400`, `drop`, `cut`, `hang`."""
        self.sick = ""
        """Every health check fails with this."""
        self.broken_load = False
        self.hangs_at = ""
        """A path whose next call is never answered, as by a process that was stopped."""
        self.stops_at = ""
        """A path whose next call stops this process."""
        self.update: dict[str, Any] | None = None
        """What has come since an update was started."""
        self.asleep = False
        self.asked: list[dict[str, Any]] = []
        """Every request for tokens."""
        self.more: dict[str, Handler] = {}
        self.url = ""
        self._port = 0
        self._transports: set[asyncio.Transport] = set()
        self._stack = contextlib.AsyncExitStack()

    def routes(self) -> dict[str, Handler]:
        raise NotImplementedError

    def end_of(self, request: web.Request) -> Handler | None:
        return (self.routes() | self.more).get(f"{request.method} {request.path}")

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port or self._port, reuse_address=True)
        await site.start()
        self._port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"
        decoding = asyncio.create_task(self.decoder.run())
        self._stack.push_async_callback(runner.cleanup)
        self._stack.callback(decoding.cancel)

    async def stop(self) -> None:
        await self._stack.aclose()
        self._stack = contextlib.AsyncExitStack()

    async def crash(self) -> None:
        """Every connection is cut, nothing listens, and what it had is lost."""
        for transport in list(self._transports):
            transport.abort()
        await self.stop()
        self.decoder = self._make()
        self.sick, self.update = "", None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        handler = self.end_of(request)
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        transport = request.transport
        assert transport is not None
        self._transports.add(transport)
        if request.path == self.stops_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        if request.path == self.hangs_at and (request.method, request.path) != ("GET", "/flush_cache"):
            self.hangs_at = ""
            await asyncio.sleep(3600)
        try:
            return await handler(request)
        finally:
            self._transports.discard(transport)

    async def health(self, request: web.Request) -> web.Response:
        if self.sick == "hang":
            await asyncio.sleep(3600)
        return web.Response(status=503 if self.sick else 200)

    async def streamed(
        self,
        request: web.Request,
        sequence: Sequence,
        event: Callable[[list[tuple[int, float, str]], str], Any],
        *,
        tells_empty: bool = True,
    ) -> web.StreamResponse:
        """Events until the sequence has ended; whoever hangs up has aborted it.

        Unless it `tells_empty`, the end of a sequence that was aborted before its first token is no event.
        """
        fault = self.faults.pop(0) if self.faults else ""
        if fault in ("500", "400"):
            return web.json_response({"error": {"message": "injected", "code": int(fault)}}, status=int(fault))
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
        if fault == "hang":
            self.decoder.hung = True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.decoder.add(sequence)
        try:
            async for made, how in _events(sequence):
                if not (tells_empty or sequence.made):
                    continue
                await response.write(f"data: {json.dumps(event(made, how))}\n\n".encode())
                if fault == "cut" and len(sequence.made) >= 5:
                    assert request.transport is not None
                    request.transport.abort()
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.decoder.abort([sequence])
        return response

    async def told(self, request: web.Request, event: Any) -> web.StreamResponse:
        """A stream of one event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def body(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.asked.append(body)
        return body


class FakeVllmServer(FakeServer):
    """With `VLLM_SERVER_DEV_MODE=1` unless `dev_mode` is false. Without a model after a load that failed.

    Weights in memory of a GPU lie in that of the host: a handle has the name of a segment in the place of the GPU's.
    """

    version = "0.32.0"
    packed: bool | None = None
    """What the init has said; from 0.28 on."""

    def routes(self) -> dict[str, Handler]:
        always: dict[str, Handler] = {
            "GET /health": self.health,
            "GET /version": self.show_version,
            "GET /v1/models": self.models,
            "POST /v1/completions": self.completions,
        }
        development: dict[str, Handler] = {
            "POST /pause": self.pause,
            "POST /resume": self.resume,
            "GET /is_paused": self.is_paused,
            "POST /abort_requests": self.abort_requests,
            "POST /collective_rpc": self.collective_rpc,
            "POST /reset_prefix_cache": self.reset_prefix_cache,
            "POST /init_weight_transfer_engine": self.init_weight_transfer_engine,
            "POST /start_weight_update": self.start_weight_update,
            "POST /update_weights": self.update_weights,
            "POST /finish_weight_update": self.finish_weight_update,
            "POST /sleep": self.sleep,
            "POST /wake_up": self.wake_up,
        }
        if self.version != "0.26.0":
            development["POST /update_weight_version"] = self.update_weight_version
            development["GET /weight_info"] = self.weight_info
        return always | (development if self.dev_mode else {})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.body(request)
        if body["model"] != "policy":
            return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)
        if not 0.0 <= body["temperature"] <= 2.0:
            said = f"temperature must be in [0, 2], got {body['temperature']}. (parameter=temperature)"
            return web.json_response({"error": {"message": said, "type": "BadRequestError", "code": 400}}, status=400)
        assert body["stream"] and body["return_token_ids"] and body["logprobs"] is not None
        if self.decoder.torn:
            self.sick = "yes"
            return await self.told(request, {"error": {"message": "EngineCore encountered an issue.", "code": 500}})
        name = f"cmpl-{body['request_id']}"
        sequence = Sequence(
            key=f"{name}-0",
            prompt=body["prompt"],
            count=body["max_tokens"],
            temperature=body["temperature"],
            top_k=body["top_k"],
            ends={*body["stop_token_ids"], *([] if body.get("ignore_eos") else [OWN_END])},
            salt=body.get("cache_salt", ""),
        )

        def event(made: list[tuple[int, float, str]], how: str) -> Any:
            choice = {
                "index": 0,
                "text": "?" * len(made),
                "token_ids": [token for token, _, _ in made],
                "logprobs": {"tokens": [""] * len(made), "token_logprobs": [logp for _, logp, _ in made]},
                "finish_reason": how or None,
            }
            return {"id": name, "object": "text_completion", "model": "policy", "choices": [choice]}

        return await self.streamed(request, sequence, event, tells_empty=False)

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return web.json_response({"error": f"mode {mode}"}, status=400)
        self.decoder.pause()
        if mode == "abort":
            self.decoder.abort(list(self.decoder.running))
            self.decoder.prefixes.clear()
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.decoder.go_on()
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.decoder.paused})

    async def abort_requests(self, request: web.Request) -> web.Response:
        wanted = (await request.json()).get("request_ids")
        found = [one for one in self.decoder.running if not wanted or one.key in wanted]
        self.decoder.abort(found)
        return web.json_response({"status": "aborted", "aborted": len(found)})

    async def show_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        assert ("packed" in info) == (self.version != "0.26.0")
        self.packed = info.get("packed")
        return web.json_response({"message": "Weight transfer initialized"})

    async def start_weight_update(self, request: web.Request) -> web.Response:
        assert self.update is None and not self.asleep
        self.update = {}
        return web.json_response({"message": "Weight update started"})

    async def update_weights(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        assert self.update == {} and (info["packed"] if self.version == "0.26.0" else self.packed)
        self.update = info
        return web.json_response({"message": "Weights updated"})

    async def finish_weight_update(self, request: web.Request) -> web.Response:
        assert self.update
        info, self.update = self.update, None
        (arguments,) = unpickle(info["ipc_handles_pickled"]).values()
        assert arguments[1] == (sum(info["tensor_sizes"]),) and arguments[6] == "GPU-0"
        segment, start = SharedSegment.attach(arguments[7]), arguments[3]
        for name, shape, size in zip(info["names"], info["shapes"], info["tensor_sizes"], strict=True):
            if name == TENSOR:
                self.decoder.load_rows(read_rows(segment, start, shape), f"by {arguments[7][:5]}")
            start += size
        segment.close()
        return web.json_response({"message": "Weight update finished"})

    async def sleep(self, request: web.Request) -> web.Response:
        assert request.query["level"] == "2" and not self.decoder.running
        self.asleep = self.decoder.torn = True
        return web.Response()

    async def wake_up(self, request: web.Request) -> web.Response:
        self.asleep = self.decoder.torn = False
        self.decoder.go_on()
        return web.Response()

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "headway_label":
            self.decoder.label = body.get("kwargs", {}).get("label") or self.decoder.label
            return web.json_response({"results": [self.decoder.label]})
        assert body["method"] in ("reload_weights", "headway_load")
        try:
            if self.broken_load:
                raise RuntimeError("CUDA error")
            self.decoder.load(Path(body["kwargs"]["weights_path"]))
        except Exception as error:
            self.decoder.torn = True
            said = f"Call to collective_rpc method failed: Worker failed with error '{error}', please check"
            about = {"message": said, "type": "InternalServerError", "param": None, "code": 500}
            return web.json_response({"error": about}, status=500)
        return web.json_response({"results": [None]})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        if not self.decoder.running:
            self.decoder.prefixes.clear()
        return web.json_response({"success": not self.decoder.running})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self.decoder.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.decoder.label})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.decoder.label})


class FakeSglangServer(FakeServer):
    """`incremental`: events hold only what is new, as with `--incremental-streaming-output`.

    `lingering`: how often it is asked to empty its cache before a request has ended whose connection was closed.
    """

    incremental = False
    lingering = 0

    def routes(self) -> dict[str, Handler]:
        return {
            "GET /health": self.health,
            "GET /model_info": self.model_info,
            "GET /server_info": self.server_info,
            "POST /generate": self.generate,
            "POST /abort_request": self.abort_request,
            "POST /pause_generation": self.pause_generation,
            "POST /continue_generation": self.continue_generation,
            "POST /update_weights_from_disk": self.update_weights_from_disk,
            "POST /update_weights_from_tensor": self.update_weights_from_tensor,
            "POST /release_memory_occupation": self.release_memory_occupation,
            "POST /resume_memory_occupation": self.resume_memory_occupation,
            "GET /flush_cache": self.flush_cache,
            "POST /flush_cache": self.flush_cache,
        }

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.16", "tp_size": 1})

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        (one,) = body["serialized_named_tensors"]
        if self.lingering:
            await self.crash()  # it could not empty its cache afterwards
        for name, (_, shape, _, start, _, _, uuid, handle, *_) in unpickle(one):
            assert uuid == "GPU-0"
            if name == TENSOR:
                segment = SharedSegment.attach(handle)
                self.decoder.load_rows(read_rows(segment, 4 * start, shape), f"by {handle[:5]}")
                segment.close()
        self.decoder.label = body["weight_version"]
        return web.json_response({"success": True, "message": "Success"})

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        assert (await request.json())["tags"] == ["weights", "kv_cache"] and not self.decoder.running
        self.asleep = True
        return web.Response()

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        self.asleep = False
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "policy", "weight_version": self.decoder.label})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.body(request)
        await self.decoder.going.wait()  # at the door, not in a queue
        params = body["sampling_params"]
        sequence = Sequence(
            key=body["rid"],
            prompt=body["input_ids"],
            count=params["max_new_tokens"],
            temperature=params["temperature"],
            top_k=params["top_k"],
            ends=set(params["stop_token_ids"]),
            salt=body.get("extra_key", ""),
        )
        pairs: list[Any] = []

        def event(made: list[tuple[int, float, str]], how: str) -> Any:
            new = [[logp, token, None] for token, logp, _ in made]
            pairs.extend(new)
            about = {
                "id": sequence.key,
                "output_token_logprobs": list(new if self.incremental else pairs),
                "completion_tokens": len(pairs),
                "weight_version": self.decoder.label,
                "finish_reason": {"type": how} if how else None,
            }
            return {"text": "", "output_ids": [pair[1] for pair in pairs], "meta_info": about}

        return await self.streamed(request, sequence, event)

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid, everyone = body.get("rid", ""), body.get("abort_all", False)
        found = [one for one in self.decoder.running if everyone or (rid and one.key.startswith(rid))]
        self.decoder.abort(found)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        self.decoder.pause()
        if (await request.json()).get("mode", "abort") == "abort":
            while self.decoder.running:
                self.decoder.abort(list(self.decoder.running))
                await asyncio.sleep(1.0)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await request.json()
        self.decoder.go_on()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            if self.broken_load:
                raise RuntimeError("CUDA error")
            self.decoder.load(Path(body["model_path"]))
        except Exception as error:
            said = f"Failed to update weights: {error}."
            return web.json_response({"success": False, "message": said, "num_paused_requests": 0}, status=400)
        self.decoder.label = body.get("weight_version") or self.decoder.label
        if body.get("flush_cache", True):
            self.decoder.prefixes.clear()
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def flush_cache(self, request: web.Request) -> web.Response:
        if self.decoder.running or self.lingering:
            self.lingering -= bool(self.lingering)
            return web.Response(status=400)
        self.decoder.prefixes.clear()
        return web.Response(text="Cache flushed.")


class WithoutTorch(pickle.Unpickler):
    """Reads what torch would rebuild as its arguments."""

    def find_class(self, module: str, name: str) -> Any:
        return (lambda *arguments: arguments) if module.startswith("torch") else super().find_class(module, name)


def unpickle(text: str) -> Any:
    return WithoutTorch(io.BytesIO(base64.b64decode(text))).load()


def read_rows(segment: SharedSegment, start: int, shape: Any) -> list[list[float]]:
    """A table of float32 in shared memory."""
    flat = array.array("f", bytes(segment.buffer[start : start + 4 * shape[0] * shape[1]]))
    return [list(flat[row * shape[1] : (row + 1) * shape[1]]) for row in range(shape[0])]


async def _events(sequence: Sequence) -> AsyncIterator[tuple[list[tuple[int, float, str]], str]]:
    while True:
        what = await sequence.events.get()
        if isinstance(what, str):
            yield [], what
            return
        yield [what], ""


KINDS: dict[str, type[FakeServer]] = {"vllm": FakeVllmServer, "sglang": FakeSglangServer}


def read_stop_once() -> str:
    """The path at which this process stops, unless one before it has done so."""
    path, _, once = os.environ.get("STANDIN_STOPS", "").partition(" ")
    if not path or Path(once).exists():
        return ""
    Path(once).touch()
    return path


async def serve(kind: str, port: int, decoder: Callable[[], Decoder]) -> None:
    """Until somebody posts to `/end`; then what has been seen is the answer."""
    server, over = KINDS[kind](decoder), asyncio.Event()
    server.stops_at = read_stop_once()

    async def end(request: web.Request) -> web.Response:
        over.set()
        seen = server.decoder
        return web.json_response({"loads": seen.loads, "running": seen.loaded_while_running, "stale": seen.stale})

    server.more["POST /end"] = end
    await server.start(port)
    print(f"{kind} fake server on {server.url}", flush=True)
    await over.wait()
    await server.stop()


def serve_model(kind: str, port: int, model: str) -> None:
    """Of a directory that `transformers` reads."""
    asyncio.run(serve(kind, port, lambda: Decoder(Transformer(Path(model)), step_s=0.0)))


if __name__ == "__main__":
    options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
    if os.environ.get("STANDIN_FAILS"):
        print("(Worker pid=7) ERROR 12:50:33 [executor.py:953] OSError: no such file", *["traceback"] * 20, sep="\n")
        print("loading weights", flush=True)
        sys.exit("RuntimeError: no kernel image is available")
    rows = counting_rows(64)
    asyncio.run(serve(sys.argv[1], int(options["--port"]), lambda: Decoder(Table(rows), step_s=0.005)))
