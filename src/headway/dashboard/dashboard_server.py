"""The server of the dashboard: a page, its parts, and numbers of runs as JSON, all of it to read.

    GET /                                 the page
    GET /api/runs                         all runs in one glance
    GET /api/stream?run=…                 what is new, as server-sent events
    GET /api/run/…?run=…                  curves, timeline, trace, flow, samples, group, pictures, config, health

Guarantees: no request changes anything. The server listens beyond this machine only with a token. Without a token it
answers to the names of this machine alone, so that no page of another site can reach it through the browser. What
models and environments wrote leaves it as JSON; the page may load nothing from elsewhere and run no script in a text.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

from aiohttp import web

from headway.dashboard.run_catalogue import RunCatalogue
from headway.dashboard.run_view import RunView
from headway.dashboard.sample_view import SampleFilter
from headway.errors import ConfigError
from headway.monitor.event_files import read_event_log
from headway.monitor.perfetto_trace import write_perfetto_trace
from headway.monitor.report_charts import CHARTS
from headway.monitor.run_report import to_plain_json

COOKIE = "headway_token"
_STREAM_EVERY_S = 0.3
_KEEP_ALIVE_S = 15.0
_MOST_RUNS = 12
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
_STATIC = {"app.js": "text/javascript", "app.css": "text/css", "icon.svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashboardServer:
    """Answers requests about the runs of a catalogue."""

    def __init__(self, catalogue: RunCatalogue, *, token: str | None = None) -> None:
        self._catalogue, self._token = catalogue, token
        self._streams = 0

    @asynccontextmanager
    async def serve(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answer on a bound socket until the block ends."""
        runner = web.AppRunner(self.make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        watching = asyncio.ensure_future(self._catalogue.watch())
        try:
            yield
        finally:
            watching.cancel()
            await runner.cleanup()
            self._catalogue.close()

    def make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._send_page)
        app.router.add_get("/static/{name}", self._send_static)
        app.router.add_get("/api/runs", self._list_runs)
        app.router.add_get("/api/stream", self._stream)
        app.router.add_get("/api/run/trace", self._send_trace)
        app.router.add_get("/api/run/picture", self._send_picture)
        answers: dict[str, Callable[[RunView, web.Request], Any]] = {
            "curves": lambda view, request: view.make_curves(
                _get_integer(request, "from"), _get_integer(request, "to")
            ),
            "timeline": lambda view, request: view.make_timeline(
                _get_number(request, "from"), _get_number(request, "to"), _get_integer(request, "bins") or 600
            ),
            "flow": lambda view, request: view.make_flow(),
            "samples": lambda view, request: view.samples.search(_make_filter(request)),
            "group": lambda view, request: view.samples.read_group(request.query.get("sample", "")),
            "pictures": lambda view, request: view.samples.list_pictures(),
            "config": lambda view, request: {"rows": view.make_config(), "facts": view.make_facts()},
            "health": lambda view, request: {"status": view.make_status(), "incidents": view.make_incidents()},
        }
        for name, answer in answers.items():
            app.router.add_get(f"/api/run/{name}", self._make_handler(answer))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is None:
            if _get_host_name(request) not in _LOCAL_NAMES:
                raise web.HTTPForbidden(text="this dashboard answers to localhost only", headers=_HEADERS)
        elif not self._is_known(request):
            raise web.HTTPUnauthorized(text="open it with ?token=…, as `headway dashboard` prints it", headers=_HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as refusal:
            refusal.headers.update(_HEADERS)
            raise
        if not response.prepared:
            response.headers.update(_HEADERS)
            if self._token is not None and "token" in request.query:
                response.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict")
        return response

    def _is_known(self, request: web.Request) -> bool:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = (request.query.get("token", ""), request.cookies.get(COOKIE, ""), bearer)
        return any(hmac.compare_digest(one.encode(), (self._token or "").encode()) for one in given)

    async def _send_page(self, request: web.Request) -> web.Response:
        return web.Response(body=_read_static("index.html"), content_type="text/html", charset="utf-8")

    async def _send_static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in _STATIC:
            raise web.HTTPNotFound
        response = web.Response(body=_read_static(name), content_type=_STATIC[name], charset="utf-8")
        response.enable_compression()
        return response

    async def _list_runs(self, request: web.Request) -> web.Response:
        found = await self._catalogue.call(self._catalogue.find_runs)
        runs = [self._catalogue.heads.get(name, {"id": name, "name": name, "state": "unread"}) for name in found]
        return _make_json({"root": str(self._catalogue.root), "runs": runs, "charts": to_plain_json(CHARTS)})

    def _make_handler(self, answer: Callable[[RunView, web.Request], Any]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            view = await self._find(request)
            try:
                return _make_json(await self._catalogue.call(answer, view, request))
            except ValueError as error:
                raise web.HTTPBadRequest(text=str(error)) from error

        return handle

    async def _find(self, request: web.Request) -> RunView:
        """Return the run that a request names, as it is now."""
        run_id = request.query.get("run", "")
        view = await self._catalogue.call(self._catalogue.open_view, run_id)
        if view is None:
            raise web.HTTPNotFound(text=f"there is no run {run_id}")
        await self._catalogue.call(self._catalogue.refresh_run, run_id)
        return view

    async def _send_picture(self, request: web.Request) -> web.Response:
        view = await self._find(request)
        number = _get_integer(request, "id")
        picture = await self._catalogue.call(view.samples.read_picture, -1 if number is None else number)
        if picture is None:
            raise web.HTTPNotFound
        return web.Response(body=picture, content_type="image/png")

    async def _send_trace(self, request: web.Request) -> web.StreamResponse:
        """Send the whole run, or a stretch of it, for ui.perfetto.dev."""
        view = await self._find(request)
        name = "".join(
            letter if letter.isalnum() or letter in "-_." else "-" for letter in view.directory.resolve().name
        )
        from_s, to_s = _get_number(request, "from"), _get_number(request, "to")
        low_s, high_s = 0.0 if from_s is None else from_s, float("inf") if to_s is None else to_s
        disposition = f'attachment; filename="{name}.trace.json.gz"'
        response = web.StreamResponse(headers={**_HEADERS, "Content-Disposition": disposition})
        response.content_type = "application/gzip"
        await response.prepare(request)
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=8)
        loop = asyncio.get_running_loop()

        def write() -> None:
            sink = _PieceSink(lambda piece: asyncio.run_coroutine_threadsafe(pieces.put(piece), loop).result())
            try:
                with gzip.open(sink, "wt", encoding="utf-8") as stream:
                    seen = (one for one in read_event_log(view.directory) if low_s <= one.time_s <= high_s)
                    write_perfetto_trace(seen, stream)
                sink.flush()
            finally:
                asyncio.run_coroutine_threadsafe(pieces.put(None), loop).result()

        writing = loop.run_in_executor(None, write)
        while (piece := await pieces.get()) is not None:
            await response.write(piece)
        await writing
        await response.write_eof()
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send what is new about the chosen runs, and all runs in one glance when one has changed."""
        chosen = request.query.getall("run", [])[:_MOST_RUNS]
        response = web.StreamResponse(headers={**_HEADERS, "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        seen: dict[str, tuple[int, int, int]] = {}
        heads, quiet_s = -1, 0.0
        with suppress(ConnectionError, asyncio.CancelledError):
            while True:
                news = {run_id: one for run_id in chosen if (one := await self._collect_news(run_id, seen)) is not None}
                message: dict[str, Any] = {"runs": news} if news else {}
                if self._catalogue.revision != heads:
                    heads = self._catalogue.revision
                    message["heads"] = list(self._catalogue.heads.values())
                quiet_s += _STREAM_EVERY_S
                if message or quiet_s > _KEEP_ALIVE_S:
                    quiet_s = 0.0
                    await response.write(f"data: {_encode(message)}\n\n".encode())
                await asyncio.sleep(_STREAM_EVERY_S)
        return response

    async def _collect_news(self, run_id: str, seen: dict[str, tuple[int, int, int]]) -> dict[str, Any] | None:
        """Return what a run has had since it was `seen`, or None if nothing is new."""
        more = await self._catalogue.call(self._catalogue.refresh_run, run_id)
        view = await self._catalogue.call(self._catalogue.open_view, run_id)
        if view is None:
            return None
        revision, generation, changes = seen.get(run_id, (-1, -1, -1))
        if view.revision == revision:
            return None
        head = self._catalogue.heads.get(run_id)
        if head is None:
            head = await self._catalogue.call(view.make_head)
        points = view.columns.since(changes) if head["generation"] == generation else None
        seen[run_id] = (view.revision, head["generation"], view.columns.changes)
        news = {"head": head, "status": view.make_status(), "reading": more}
        return {**news, "points": points} if points is not None else {**news, "reload": True}


class _PieceSink:
    """A file to write to that hands pieces of bytes on."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send, self._held = send, bytearray()

    def write(self, data: bytes) -> int:
        self._held += data
        if len(self._held) > 1 << 16:
            self.flush()
        return len(data)

    def flush(self) -> None:
        if self._held:
            self._send(bytes(self._held))
            self._held.clear()


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        problem = f"cannot listen there: {error}"
        raise ConfigError(problem, key="--port", value=port, hint="another one, or 0 for any that is free") from error


def _read_static(name: str) -> bytes:
    return files("headway.dashboard").joinpath("static", name).read_bytes()


def _make_json(value: Any) -> web.Response:
    response = web.Response(text=_encode(value), content_type="application/json")
    response.enable_compression()
    return response


def _encode(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        return json.dumps(to_plain_json(value), separators=(",", ":"), allow_nan=False)


def _get_host_name(request: web.Request) -> str:
    host = request.headers.get("Host", "")
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def _get_number(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"{name}={text} is not a number") from None


def _get_integer(request: web.Request, name: str) -> int | None:
    number = _get_number(request, name)
    return None if number is None else int(number)


def _make_filter(request: web.Request) -> SampleFilter:
    def limits(name: str) -> tuple[float | None, float | None]:
        return _get_number(request, f"{name}_from"), _get_number(request, f"{name}_to")

    return SampleFilter(
        text=request.query.get("text", ""),
        kind=request.query.get("kind", ""),
        steps=limits("step"),
        rewards=limits("reward"),
        lags=limits("lag"),
        task=_get_integer(request, "task"),
        group=_get_integer(request, "group"),
    )
