"""HTTP server: routes, keys, limits, streams.

    POST /v1/chat/completions, /v1/completions      GET /v1/models, /health
    POST /sessions/{id}/v1/…                        the same, as turns of an episode (or with `X-Headway-Session`)
    POST /sessions/{id}/reward                      {"reward": 1.0, "done": true}

Guarantees: the server listens beyond this machine only with a token; the size of bodies and the number of concurrent
requests are bounded; a client that disconnects stops its generation; every refusal has OpenAI's form. This is the only
module that needs aiohttp.
"""

import asyncio
import hmac
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from aiohttp import web

from headway.errors import ConfigError
from headway.serving.agent_sessions import AgentSession, AgentSessions
from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import ChatCompletionRequest, parse_chat_request, parse_text_request
from headway.serving.completions import Completion, CompletionWriter, JsonBody, StreamingDetokenizer
from headway.serving.direct_completions import AnyRequest, CompletionBackend, CompletionDelta
from headway.serving.request_errors import RequestRefused, invalid_field, too_many_requests, wrong_api_key

RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SESSION_HEADER = "X-Headway-Session"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What clients may demand of a server."""

    body_mb: float = 16.0
    requests: int = 256
    """Requests that run or wait for the engine at once; further ones are refused with 429."""
    retry_after_s: int = 1
    shutdown_s: float = 30.0
    """How long running requests may take after the server was told to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the routes serve. With `sessions` and without `direct`, only turns of episodes are answered."""

    model: str
    template: ChatTemplate
    direct: CompletionBackend | None = None
    sessions: AgentSessions | None = None
    health: Callable[[], JsonBody] = dict
    """Returns further fields of `/health`; raises `RequestRefused` if the model is unhealthy."""


class CompletionServer:
    """An HTTP server on one listening socket."""

    def __init__(self, served: ServedModel, *, token: str | None = None, limits: ServerLimits | None = None) -> None:
        self._served, self._token, self._limits = served, token, limits or ServerLimits()
        self._created = int(time.time())
        self._running = 0
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen and return the address, as `http://host:port`. Raises `ConfigError`."""
        check_address(host, port, self._token)
        runner = self._runner = web.AppRunner(
            self._make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=self._limits.shutdown_s
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await self.close()
            raise ConfigError(f"cannot listen there: {error}", key="--port", value=port) from error
        name, number = runner.addresses[0][:2]
        return f"http://{f'[{name}]' if ':' in name else name}:{number}"

    async def close(self) -> None:
        """Refuse new requests, let running ones finish, then stop."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[_refusal_middleware], client_max_size=int(self._limits.body_mb * (1 << 20)))
        app.router.add_get("/health", self._handle_health)
        for prefix in ("", "/sessions/{session}"):
            app.router.add_get(prefix + "/v1/models", self._handle_models)
            app.router.add_get(prefix + "/v1/models/{model:.+}", self._handle_models)
            app.router.add_post(prefix + "/v1/chat/completions", self._make_handler(parse_chat_request))
            app.router.add_post(prefix + "/v1/completions", self._make_handler(parse_text_request))
        app.router.add_post("/sessions/{session}/reward", self._handle_reward)
        return app

    async def _handle_health(self, http_request: web.Request) -> web.Response:
        body = {"status": "ok", "model": self._served.model, "requests": self._running}
        return web.json_response({**body, **self._served.health()})

    async def _handle_models(self, http_request: web.Request) -> web.Response:
        self._find_backend(http_request)
        model = {"id": self._served.model, "object": "model", "created": self._created, "owned_by": "headway"}
        wanted = http_request.match_info.get("model")
        if wanted is None:
            return web.json_response({"object": "list", "data": [model]})
        self._check_model(wanted)
        return web.json_response(model)

    async def _handle_reward(self, http_request: web.Request) -> web.Response:
        session = self._find_session(http_request)
        body = await _read_json_body(http_request)
        value, done = body.get("reward", 0.0), body.get("done", False)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid_field("reward", value, "a number")
        if not isinstance(done, bool):
            raise invalid_field("done", done, "true or false")
        total = session.add_reward(float(value), done=done)
        return web.json_response({"session": session.session_id, "reward": total, "done": done})

    def _make_handler(self, parse: Callable[[Any], AnyRequest]) -> RequestHandler:
        async def handle(http_request: web.Request) -> web.StreamResponse:
            backend = self._find_backend(http_request)
            if self._running >= self._limits.requests:
                problem = f"{self._limits.requests} requests are at work already"
                raise too_many_requests(problem, retry_after_s=self._limits.retry_after_s)
            self._running += 1
            try:
                request = parse(await _read_json_body(http_request))
                if not isinstance(backend, AgentSession):
                    self._check_model(request.model)
                return await self._respond(http_request, request, backend)
            finally:
                self._running -= 1

        return handle

    async def _respond(
        self, http_request: web.Request, request: AnyRequest, backend: CompletionBackend
    ) -> web.StreamResponse:
        name = uuid4().hex[:24]
        writer = CompletionWriter(
            request=request,
            template=self._served.template,
            response_id=f"{'chatcmpl' if isinstance(request, ChatCompletionRequest) else 'cmpl'}-{name}",
            created=int(time.time()),
        )
        if not request.stream:
            completion = await backend.complete(request, name, lambda delta: None)
            return web.json_response(writer.write_completion(completion))
        deltas: asyncio.Queue[CompletionDelta | None] = asyncio.Queue()
        task = asyncio.ensure_future(backend.complete(request, name, deltas.put_nowait))
        task.add_done_callback(lambda _: deltas.put_nowait(None))
        try:
            first = await deltas.get()
            if first is None and task.exception() is not None:
                await task  # raises before the stream begins, so that the client gets an HTTP status
            return await _stream_completion(http_request, writer, first, deltas, task)
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _find_backend(self, http_request: web.Request) -> CompletionBackend:
        """Return the backend for this client, after checking its key. Raises `RequestRefused`."""
        names_session = "session" in http_request.match_info or SESSION_HEADER in http_request.headers
        if names_session and self._served.sessions is not None:
            return self._find_session(http_request)
        if self._served.direct is None:
            raise RequestRefused(f"say which session: /sessions/ID/v1 or {SESSION_HEADER}", param="session")
        key = _read_api_key(http_request)
        if self._token is not None and not hmac.compare_digest(self._token.encode(), key.encode()):
            raise wrong_api_key()
        return self._served.direct

    def _find_session(self, http_request: web.Request) -> AgentSession:
        name: str = http_request.match_info.get("session") or http_request.headers.get(SESSION_HEADER) or ""
        if self._served.sessions is None:
            raise RequestRefused("there are no sessions here", status=404, param="session")
        return self._served.sessions.find(name, _read_api_key(http_request))

    def _check_model(self, wanted: str) -> None:
        if wanted != self._served.model:
            problem = f"there is no model {wanted!r} here, only {self._served.model!r}"
            raise RequestRefused(problem, status=404, param="model", code="model_not_found")


async def _stream_completion(
    http_request: web.Request,
    writer: CompletionWriter,
    delta: CompletionDelta | None,
    deltas: asyncio.Queue[CompletionDelta | None],
    task: asyncio.Future[Completion],
) -> web.StreamResponse:
    """Send server-sent events until all choices have ended. `delta` is the first one; `None` is the last."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http_request)

    async def send(body: JsonBody) -> None:
        await response.write(b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n")

    request = writer.request
    streams = [StreamingDetokenizer(writer.template, request) for _ in range(request.num_choices)]
    if isinstance(request, ChatCompletionRequest):
        for index in range(request.num_choices):
            await send(writer.write_first_chunk(index))
    while delta is not None:
        text = streams[delta.index].add(delta.tokens)
        if text or request.logprobs or request.return_token_ids:
            await send(writer.write_delta(delta.index, text, delta.tokens, delta.logps))
        delta = await deltas.get()
    try:
        completion = await task
    except RequestRefused as refusal:
        await send(refusal.body)
        return response
    for index, choice in enumerate(completion.choices):
        if rest := streams[index].remaining(choice.text):
            await send(writer.write_delta(index, rest, (), ()))
        if choice.tool_calls:
            await send(writer.write_tool_calls(index, choice))
        await send(writer.write_last_chunk(index, choice))
    if request.include_usage:
        await send(writer.write_usage_chunk(completion))
    await response.write(b"data: [DONE]\n\n")
    return response


@web.middleware
async def _refusal_middleware(request: web.Request, handler: RequestHandler) -> web.StreamResponse:
    """Convert every refusal and HTTP error to OpenAI's form."""
    try:
        return await handler(request)
    except RequestRefused as error:
        refusal = error
    except web.HTTPRequestEntityTooLarge:
        refusal = RequestRefused("the body is too large", status=413, code="request_too_large")
    except web.HTTPException as error:
        problem = f"{request.method} {request.path}: {error.reason}"
        refusal = RequestRefused(problem, status=error.status, code="not_found")
    return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)


async def _read_json_body(http_request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await http_request.read())
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    return body


def _read_api_key(http_request: web.Request) -> str:
    scheme, _, key = http_request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def check_address(host: str, port: int, token: str | None) -> None:
    """Check that the server may listen there: beyond this machine only with a token. Raises `ConfigError`."""
    if not 0 <= port <= 65535:
        raise ConfigError("is no port", key="--port", value=port, hint="1 to 65535, or 0 for any that is free")
    if token is None and not is_loopback(host):
        problem = "is not this machine alone, and there is no token"
        raise ConfigError(problem, key="--host", value=host, hint="--token SECRET, or 127.0.0.1")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
