"""HTTP: routes, tokens, limits, streams.

    POST /v1/chat/completions, /v1/completions      GET /v1/models, /health
    POST /sessions/{id}/v1/…                        the same, as turns of an episode (or by `X-Headway-Session`)
    POST /sessions/{id}/reward                      {"reward": 1.0, "done": true}

Guarantees: listens beyond this machine only with a token; bodies and the number of requests at work are bounded; a
client that goes away stops what is generated for it; every refusal has OpenAI's form. The only module that needs
aiohttp.
"""

from __future__ import annotations

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
from headway.serving.completion_requests import (
    ChatCompletionRequest,
    TextCompletionRequest,
    parse_chat_request,
    parse_text_request,
)
from headway.serving.completions import Completion, CompletionWriter, JsonBody, StreamingDetokenizer
from headway.serving.direct_completions import CompletionBackend, CompletionDelta
from headway.serving.request_errors import RequestRefused, invalid_field

RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SESSION_HEADER = "X-Headway-Session"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What clients may ask of a server."""

    body_mb: float = 16.0
    requests: int = 256
    """At work or waiting for the engine; one more is refused, to come back later."""
    retry_after_s: int = 1
    shutdown_s: float = 30.0
    """How long answers that are on their way may take once the server is to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is behind the routes. With `sessions`, and nothing `direct`, only turns of episodes are answered."""

    model: str
    dialect: ChatTemplate
    direct: CompletionBackend | None = None
    sessions: AgentSessions | None = None
    health: Callable[[], JsonBody] = dict
    """More to say about health; raises `RequestRefused` where there is none."""


class CompletionServer:
    """One listening socket."""

    def __init__(self, service: ServedModel, *, token: str | None = None, limits: ServerLimits | None = None) -> None:
        self._service, self._token, self._limits = service, token, limits or ServerLimits()
        self._created = int(time.time())
        self._working = 0
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; the address, as `http://host:port`. Raises `ConfigError`."""
        check_address(host, port, self._token)
        runner = self._runner = web.AppRunner(
            self._app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=self._limits.shutdown_s,
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
        """Take nothing more, let answers that are on their way arrive, then go."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[_refusal_middleware], client_max_size=int(self._limits.body_mb * (1 << 20)))
        app.router.add_get("/health", self._health)
        for prefix in ("", "/sessions/{session}"):
            app.router.add_get(prefix + "/v1/models", self._models)
            app.router.add_get(prefix + "/v1/models/{model:.+}", self._models)
            app.router.add_post(prefix + "/v1/chat/completions", self._answered(parse_chat_request))
            app.router.add_post(prefix + "/v1/completions", self._answered(parse_text_request))
        app.router.add_post("/sessions/{session}/reward", self._reward)
        return app

    # -- routes

    async def _health(self, request: web.Request) -> web.Response:
        found = {"status": "ok", "model": self._service.model, "requests": self._working}
        return web.json_response({**found, **self._service.health()})

    async def _models(self, request: web.Request) -> web.Response:
        self._admitted(request)
        one = {"id": self._service.model, "object": "model", "created": self._created, "owned_by": "headway"}
        wanted = request.match_info.get("model")
        if wanted is None:
            return web.json_response({"object": "list", "data": [one]})
        if wanted != self._service.model:
            raise _unknown_model(wanted, self._service.model)
        return web.json_response(one)

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await _read_json_body(request)
        value, done = body.get("reward", 0.0), body.get("done", False)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid_field("reward", value, "a number")
        if not isinstance(done, bool):
            raise invalid_field("done", done, "true or false")
        total = session.reward(float(value), done=done)
        return web.json_response({"session": session.session_id, "reward": total, "done": done})

    def _answered(self, read: Callable[[Any], ChatCompletionRequest | TextCompletionRequest]) -> RequestHandler:
        async def handle(request: web.Request) -> web.StreamResponse:
            answering = self._admitted(request)
            if self._working >= self._limits.requests:
                raise RequestRefused(
                    f"{self._limits.requests} requests are at work already",
                    status=429,
                    kind="rate_limit_error",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(self._limits.retry_after_s)},
                )
            self._working += 1
            try:
                ask = read(await _read_json_body(request))
                if not isinstance(answering, AgentSession) and ask.model != self._service.model:
                    raise _unknown_model(ask.model, self._service.model)
                return await self._answer(request, ask, answering)
            finally:
                self._working -= 1

        return handle

    async def _answer(
        self, request: web.Request, ask: ChatCompletionRequest | TextCompletionRequest, answering: CompletionBackend
    ) -> web.StreamResponse:
        name = uuid4().hex[:24]
        kind = "chatcmpl" if isinstance(ask, ChatCompletionRequest) else "cmpl"
        writer = CompletionWriter(
            ask=ask, dialect=self._service.dialect, response_id=f"{kind}-{name}", created=int(time.time())
        )
        if not ask.stream:
            return web.json_response(writer.whole(await answering.answer(ask, name, lambda piece: None)))
        pieces: asyncio.Queue[CompletionDelta | None] = asyncio.Queue()
        work = asyncio.ensure_future(answering.answer(ask, name, pieces.put_nowait))
        work.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            first = await pieces.get()
            if first is None and work.exception() is not None:
                await work
            return await _stream_completion(request, writer, first, pieces, work)
        finally:
            work.cancel()
            await asyncio.wait([work])

    # -- who may

    def _admitted(self, request: web.Request) -> CompletionBackend:
        """Who answers this client. Raises `RequestRefused`."""
        asked = "session" in request.match_info or SESSION_HEADER in request.headers
        if asked and self._service.sessions is not None:
            return self._session(request)
        if self._service.direct is None:
            raise RequestRefused(f"say which session: /sessions/ID/v1 or {SESSION_HEADER}", param="session")
        if self._token is not None and not hmac.compare_digest(self._token.encode(), _read_api_key(request).encode()):
            raise _wrong_api_key()
        return self._service.direct

    def _session(self, request: web.Request) -> AgentSession:
        name: str = request.match_info.get("session") or request.headers.get(SESSION_HEADER) or ""
        if self._service.sessions is None:
            raise RequestRefused("there are no sessions here", status=404, param="session")
        return self._service.sessions.named(name, _read_api_key(request))


async def _stream_completion(
    request: web.Request,
    writer: CompletionWriter,
    first: CompletionDelta | None,
    pieces: asyncio.Queue[CompletionDelta | None],
    work: asyncio.Future[Completion],
) -> web.StreamResponse:
    """Server-sent events until all choices have ended."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)

    async def send(body: JsonBody) -> None:
        await response.write(b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n")

    ask = writer.ask
    streams = [StreamingDetokenizer(writer.dialect, ask) for _ in range(ask.choices)]
    if isinstance(ask, ChatCompletionRequest):
        for index in range(ask.choices):
            await send(writer.opening(index))
    piece = first
    while piece is not None:
        text = streams[piece.index].more(piece.tokens)
        if text or ask.logprobs or ask.token_ids:
            await send(writer.piece(piece.index, text, piece.tokens, piece.logps))
        piece = await pieces.get()
    try:
        answers = await work
    except RequestRefused as why:
        await send(why.body)
        return response
    for index, answer in enumerate(answers.choices):
        if rest := streams[index].rest(answer.text):
            await send(writer.piece(index, rest, (), ()))
        if answer.calls:
            await send(writer.calls(index, answer))
        await send(writer.closing(index, answer))
    if ask.usage:
        await send(writer.total(answers))
    await response.write(b"data: [DONE]\n\n")
    return response


@web.middleware
async def _refusal_middleware(request: web.Request, handler: RequestHandler) -> web.StreamResponse:
    """Everything that goes wrong, in OpenAI's form."""
    try:
        return await handler(request)
    except RequestRefused as why:
        refused = why
    except web.HTTPRequestEntityTooLarge:
        refused = RequestRefused("the body is too large", status=413, code="request_too_large")
    except web.HTTPException as error:
        refused = RequestRefused(
            f"{request.method} {request.path}: {error.reason}", status=error.status, code="not_found"
        )
    return web.json_response(refused.body, status=refused.status, headers=refused.headers)


async def _read_json_body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    return body


def _read_api_key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _wrong_api_key() -> RequestRefused:
    return RequestRefused("wrong API key", status=401, kind="authentication_error", code="invalid_api_key")


def _unknown_model(wanted: str, served: str) -> RequestRefused:
    return RequestRefused(
        f"there is no model {wanted!r} here, only {served!r}", status=404, param="model", code="model_not_found"
    )


def check_address(host: str, port: int, token: str | None) -> None:
    """Whether one may listen there; beyond this machine only with a token. Raises `ConfigError`."""
    if not 0 <= port <= 65535:
        raise ConfigError("is no port", key="--port", value=port, hint="1 to 65535, or 0 for any that is free")
    if token is None and not is_loopback(host):
        problem = "is not this machine alone, and there is no token"
        raise ConfigError(problem, key="--host", value=host, hint="--token SECRET, or 127.0.0.1")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
