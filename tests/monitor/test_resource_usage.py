"""Memory and GPUs are measured without disturbing anything."""

from __future__ import annotations

import platform
import subprocess
import sys

from headway.monitor.event_log import LoggedEvent, decode_event, encode_event
from headway.monitor.events import ResourceUsage, StepBegin, StepEnd, WeightsServed
from headway.monitor.resource_usage import ResourceMeter, describe_machine
from headway.monitor.scalar_series import compute_scalars

MEGABYTES = 200


def test_the_memory_of_this_process_and_of_its_children_is_measured() -> None:
    meter = ResourceMeter()
    before = meter.measure()
    assert before["memory/controller_gb"] > 0.005
    assert before["memory/host_gb"] > before["memory/controller_gb"]
    hoard = f"x = bytearray({MEGABYTES} * 10**6); x[::4096] = b'1' * len(x[::4096]); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", hoard], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        grown = meter.measure()["memory/children_gb"] - before["memory/children_gb"]
        assert MEGABYTES / 1000 <= grown < 2 * MEGABYTES / 1000
    finally:
        child.communicate(b"\n", timeout=20)


def test_usage_is_logged_and_becomes_a_curve_of_the_step() -> None:
    usage = [ResourceUsage(who="machine", values={"memory/host_gb": value}) for value in (1.0, 3.0)]
    assert decode_event(encode_event(LoggedEvent(0.0, usage[0]))).event == usage[0]
    log = [
        LoggedEvent(0.0, WeightsServed(who="engine/0", version=0, trained=0)),
        LoggedEvent(1.0, usage[0]),
        LoggedEvent(2.0, usage[1]),
        LoggedEvent(3.0, StepBegin(who="train", trained=0)),
        LoggedEvent(4.0, StepEnd(who="train", trained=1)),
        LoggedEvent(6.0, WeightsServed(who="engine/0", version=1, trained=1)),
        LoggedEvent(8.0, StepEnd(who="train", trained=2)),
    ]
    first, second = compute_scalars(log)
    assert first.values["memory/host_gb"] == 2.0
    assert "memory/host_gb" not in second.values, "a step without a measurement has no number"
    assert (first.values["lag/served_behind"], second.values["lag/served_behind"]) == (0.0, 0.5)


def test_the_machine_is_told_in_words_that_an_event_can_hold() -> None:
    machine = describe_machine()
    assert "CPU core" in machine and platform.python_version() in machine
