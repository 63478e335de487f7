"""The live display: lines where there is no terminal, a throttled panel where there is one."""

from __future__ import annotations

import io

from rich.console import Console

from headway.monitor.live import LiveDisplay
from headway.monitor.report import Monitor

from .factory import ev, toy_run


def show(console: Console, refresh_s: float = 0.25, steps: int = 6) -> None:
    monitor = Monitor()
    with LiveDisplay(monitor, console, refresh_s=refresh_s) as live:
        for event in toy_run(steps=steps):
            monitor(event)
            live(event)


def test_without_a_terminal_every_step_is_one_line() -> None:
    stream = io.StringIO()
    show(Console(file=stream, force_terminal=False, width=80))
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if "] step " in line]) == 6
    assert "step 1: reward" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_incidents_are_shown_without_control_characters() -> None:
    stream = io.StringIO()
    live = LiveDisplay(Monitor(), Console(file=stream, force_terminal=False))
    live(ev(3.0, "error", "engine/1", error="EngineCrashed", message="[bold]bad\x1b[31m\nnews"))
    assert stream.getvalue() == "[3.00 s] error engine/1 error: EngineCrashed, message: [bold]bad [31m news\n"


def test_on_a_terminal_frames_are_limited_by_event_time() -> None:
    sizes = []
    for refresh_s in (0.5, 5.0):
        stream = io.StringIO()
        show(Console(file=stream, force_terminal=True, width=100), refresh_s=refresh_s)
        sizes.append(stream.getvalue().count("served "))
    assert sizes[0] > 4 * sizes[1] > 0


def test_the_panel_says_what_everybody_does() -> None:
    monitor = Monitor()
    live = LiveDisplay(monitor, Console(file=io.StringIO(), force_terminal=False))
    for event in toy_run(steps=4):
        monitor(event)
    stream = io.StringIO()
    Console(file=stream, width=100).print(live.panel(60.0))
    text = stream.getvalue()
    assert "step 4" in text
    assert "train stopped" in text
    assert "of 8 busy" in text
    assert "samples/s" in text
