"""Exports: Prometheus reads what is served, a collector of OpenTelemetry gets the spans of a run."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from headway.errors import ConfigError
from headway.monitor.metric_exports import PrometheusWriter
from headway.monitor.scalar_series import ScalarPoint
from headway.monitor.trackers import make_exports

from .factory import training_run


def test_prometheus_reads_the_newest_numbers_of_a_run() -> None:
    (tracker,) = make_exports(prometheus_port=0, opentelemetry_endpoint=None, run='odd"name')
    for event in training_run(steps=6, eval_steps=3):
        tracker(event)
    writer = tracker._sink._writer  # type: ignore[attr-defined]
    address = f"http://127.0.0.1:{writer.port}"
    text = urlopen(f"{address}/metrics", timeout=10).read().decode()
    with pytest.raises(HTTPError):
        urlopen(f"{address}/other", timeout=10)
    with pytest.raises(ConfigError, match=r"prometheus_port = .*nothing can listen there"):
        PrometheusWriter(writer.port, "second")
    tracker.close()
    assert 'headway_trained{run="odd_name"} 6' in text and "headway_reward_held_out{" in text
    parser = pytest.importorskip("prometheus_client.parser")
    found = {family.name: family.samples[0] for family in parser.text_string_to_metric_families(text)}
    assert found["headway_trained"].value == 6 and found["headway_reward_train"].labels == {"run": "odd_name"}


def test_numbers_that_are_not_finite_are_written_as_prometheus_has_them() -> None:
    writer = PrometheusWriter(0, "run")
    writer.write(ScalarPoint(3, 1.0, {"train/loss": float("nan"), "a": float("inf")}))
    text = writer.format_metrics()
    writer.close()
    assert "headway_train_loss" in text and " NaN\n" in text and " +Inf\n" in text


def test_a_collector_gets_steps_and_validations_below_one_span_of_the_run() -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = service.ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(span for part in request.resource_spans for scope in part.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        (sink,) = make_exports(prometheus_port=None, opentelemetry_endpoint=endpoint, run="mine")
        for event in training_run(steps=4, eval_steps=2):
            sink(event)
        sink.close()
        server.shutdown()
    assert sink.failure == ""
    (run,) = [span for span in spans if span.name == "mine"]
    steps = [span for span in spans if span.name == "step"]
    assert len(steps) == 4 and all(span.parent_span_id == run.span_id for span in steps)
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans)
    facts = [{fact.key: fact.value for fact in span.attributes} for span in steps]
    assert [fact["headway.step"].int_value for fact in facts] == [1, 2, 3, 4]
    assert "headway.reward" in facts[-1]
