"""Exports for monitoring systems, on request: numbers for Prometheus, spans for OpenTelemetry.

`PrometheusWriter` serves the newest numbers of a run on the loopback interface, as text that Prometheus reads; it needs
no package. `OpenTelemetrySink` sends training steps, validations and pieces of work as spans below one span of the run,
over OTLP. Both are switched off with one line if they fail, and never stop a run.
"""

from __future__ import annotations

import math
import re
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from headway.errors import ConfigError
from headway.extras import suggest_install
from headway.monitor.event_log import LoggedEvent
from headway.monitor.events import SpanBegin, SpanEnd, StepBegin, StepEnd, ValidateBegin, ValidateEnd
from headway.monitor.scalar_series import ScalarPoint

_LOOPBACK = "127.0.0.1"


class PrometheusWriter:
    """Serves `http://127.0.0.1:PORT/metrics`: each curve as a gauge such as `headway_reward_train`, labelled by run."""

    def __init__(self, port: int, run: str) -> None:
        self._label = f'{{run="{re.sub(r"[^ -!#-[^-~]", "_", run)}"}}'
        self._values: dict[str, float] = {"trained": 0.0}
        self._lock = Lock()
        writer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                body = writer.format_metrics().encode() if is_known else b"see /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing: the terminal belongs to the display."""

        try:
            self._server = ThreadingHTTPServer((_LOOPBACK, port), Handler)
        except OSError as error:
            problem = f"nothing can listen there: {error.strerror}"
            raise ConfigError(problem, key="prometheus_port", value=port, hint="another port") from error
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def write(self, point: ScalarPoint) -> None:
        with self._lock:
            self._values |= {**point.values, "trained": point.step, "time_s": point.time_s}

    def format_metrics(self) -> str:
        """Return the newest numbers in the text format of Prometheus."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, value in sorted(values.items()):
            metric = f"headway_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            number = "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else value
            lines += [f"# TYPE {metric} gauge", f"{metric}{self._label} {number}"]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class OpenTelemetrySink:
    """Sends spans to a collector, with the times of the events."""

    def __init__(self, endpoint: str, run: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import set_span_in_context
        except ImportError as error:
            problem, hint = f"needs a package: {error}", suggest_install("metrics")
            raise ConfigError(problem, key="opentelemetry_endpoint", value=endpoint, hint=hint) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "headway", "headway.run": run}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("headway")
        self._set_parent = set_span_in_context
        self._zero_ns: int | None = None
        self._last_ns = 0
        self._run: Any = None
        self._name = run
        self._open: dict[tuple[str, int], Any] = {}

    def __call__(self, event: LoggedEvent) -> None:
        time_s, what = event
        if self._zero_ns is None:
            self._zero_ns = time.time_ns() - int(time_s * 1e9)
            self._run = self._tracer.start_span(self._name, start_time=self._zero_ns + int(time_s * 1e9))
        self._last_ns = now_ns = self._zero_ns + int(time_s * 1e9)
        if isinstance(what, StepBegin | ValidateBegin):
            is_step = isinstance(what, StepBegin)
            number = what.trained + is_step
            self._begin(("step" if is_step else "validate", number), now_ns, {"headway.step": number})
        elif isinstance(what, StepEnd | ValidateEnd):
            reward = {} if what.reward is None else {"headway.reward": what.reward}
            self._end(("step" if isinstance(what, StepEnd) else "validate", what.trained), now_ns, reward)
        elif isinstance(what, SpanBegin):
            self._begin((what.who, what.span), now_ns, {"headway.work": what.name})
        elif isinstance(what, SpanEnd):
            self._end((what.who, what.span), now_ns, {})

    def _begin(self, key: tuple[str, int], now_ns: int, facts: dict[str, Any]) -> None:
        parent = self._set_parent(self._run)
        self._open[key] = self._tracer.start_span(key[0], context=parent, start_time=now_ns, attributes=facts)

    def _end(self, key: tuple[str, int], now_ns: int, facts: dict[str, Any]) -> None:
        span = self._open.pop(key, None)
        if span is not None:
            span.set_attributes(facts)
            span.end(now_ns)

    def close(self) -> None:
        for span in [*self._open.values(), self._run]:
            if span is not None:
                span.end(self._last_ns)
        self._provider.shutdown()
