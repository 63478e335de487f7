"""What the benchmark of whole runs reads from events."""

import pytest
from benchmarks.end_to_end import measure_spans

from headway.monitor.event_log import LoggedEvent
from headway.monitor.events import SpanBegin, SpanEnd


def test_a_span_ends_with_its_own_part_of_the_run() -> None:
    events = [
        LoggedEvent(1.0, SpanBegin(who="param_update", span=1, name="load engine/0 v1")),
        LoggedEvent(1.1, SpanBegin(who="train", span=1, name="step 2")),
        LoggedEvent(1.2, SpanEnd(who="param_update", span=1)),
        LoggedEvent(9.0, SpanEnd(who="train", span=1)),
    ]
    assert measure_spans(events, "load") == pytest.approx([0.2])
