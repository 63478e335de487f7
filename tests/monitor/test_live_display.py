"""The live display: lines where there is no terminal, a throttled panel where there is one."""

from __future__ import annotations

import io

from rich.console import Console

from headway.monitor.live_display import LiveDisplay, make_sparkline
from headway.monitor.run_report import RunMonitor
from headway.monitor.run_status import EngineStatus, RunStatus, StageStatus, WaitStatus
from tests.monitor.factory import ev, step, toy_run, training_run


def show(console: Console, refresh_s: float = 0.25, steps: int = 6) -> None:
    monitor = RunMonitor()
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
    live = LiveDisplay(RunMonitor(), Console(file=stream, force_terminal=False))
    live(ev(3.0, "error", "engine/1", error="EngineCrashed", message="[bold]bad\x1b[31m\nnews"))
    assert stream.getvalue() == "[3.00 s] engine/1: error: [bold]bad [31m news\n"


def test_an_engine_that_is_lost_and_back_is_three_lines() -> None:
    stream, why = io.StringIO(), "engine/1 (process 7) was killed by SIGKILL"
    live = LiveDisplay(RunMonitor(), Console(file=stream, force_terminal=False, width=200))
    live(ev(1.0, "down", "engine/1", reason=f"EngineCrashed: {why}"))
    live(ev(1.0, "error", "engine/1", error="EngineCrashed", message=why))
    live(ev(1.0, "restart", "engine/1", attempt=1))
    live(ev(9.0, "up", "engine/1", version=5))
    live(ev(9.0, "up", "trainer", version=3))
    assert stream.getvalue().splitlines() == [
        f"[1.00 s] engine/1: down: reason EngineCrashed: {why}",
        "[1.00 s] engine/1: restart: attempt 1",
        "[9.00 s] engine/1: back in service, serves from version 5",
        "[9.00 s] trainer: back in service, goes on from version 3",
    ]


def test_an_incident_that_comes_again_and_again_is_counted_instead_of_repeated() -> None:
    stream = io.StringIO()
    live = LiveDisplay(RunMonitor(), Console(file=stream, force_terminal=False))
    for number in range(120):
        live(ev(float(number), "error", "reward", error="RewardError", message=f"sample {number} has no verdict"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[3] == "[9.00 s] reward: error: sample 9 has no verdict (10 times so far)"
    assert lines[4].endswith("(100 times so far)")


def test_on_a_terminal_frames_are_limited_by_event_time() -> None:
    sizes = []
    for refresh_s in (0.5, 5.0):
        stream = io.StringIO()
        show(Console(file=stream, force_terminal=True, width=100), refresh_s=refresh_s)
        sizes.append(stream.getvalue().count("served "))
    assert sizes[0] > 4 * sizes[1] > 0


def test_the_panel_says_what_everybody_does() -> None:
    monitor = RunMonitor()
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


def test_the_panel_of_a_run_at_work_has_each_stage_with_its_queue_and_its_wait() -> None:
    live = LiveDisplay(RunMonitor(), Console(file=io.StringIO(), force_terminal=False, width=100))
    waits = (WaitStatus(on="rewards.mine", what="reward of sample 3.1, task 7", seconds=61.0),)
    stage = StageStatus(role="reward", state="running", seconds=61.0, queue=2, waits=waits)
    engine = EngineStatus(name="engine/0", health="up", version=4, requests=3)
    usage = {"memory/controller_gb": 1.0, "gpu_memory_gb/0": 70.0}
    live.show(RunStatus(phase="training", stages=(stage,), engines=(engine,), usage=usage))
    stream = io.StringIO()
    Console(file=stream, width=100).print(live.panel(60.0))
    text = stream.getvalue()
    assert "● reward  running 1 min 01 s  2 queued  waits for rewards.mine: reward of sample 3.1" in text
    assert "engine/0: up, version 4, 3 requests" in text and "GPU 0: 70.0 GB" in text


def test_a_stall_is_printed_with_its_culprit_first_and_every_wait() -> None:
    stream = io.StringIO()
    live = LiveDisplay(RunMonitor(), Console(file=stream, force_terminal=False))
    graph = "  culprit: scores waits for math: sample 3.1 (for 9.0 s)\n  train waits for reward: a batch (for 8.0 s)"
    live(ev(70.0, "stall", "flow", graph=graph, quiet_s=60.0))
    first, second = stream.getvalue().splitlines()
    assert first == "[1 min 10 s] nothing has moved for 60 s; culprit: scores waits for math: sample 3.1 (for 9.0 s)"
    assert second == "  train waits for reward: a batch (for 8.0 s)"


def panel_text(monitor: RunMonitor, now_s: float, steps: int | None = None) -> str:
    live = LiveDisplay(monitor, Console(file=io.StringIO(), force_terminal=False), steps=steps)
    stream = io.StringIO()
    Console(file=stream, width=120).print(live.panel(now_s))
    return stream.getvalue()


def test_the_panel_of_a_training_run_says_how_it_learns_and_when_it_ends() -> None:
    monitor = RunMonitor()
    for event in training_run(steps=10, finished=False):
        monitor(event)
    text = panel_text(monitor, monitor.clock.last_s, steps=20)
    assert "step 10/20" in text and " left" in text
    assert "held-out 0.550 ▁" in text and "reward 0." in text
    assert "tokens/s trained" in text and "generated" in text


def test_what_is_left_gets_less_while_a_step_takes_its_time() -> None:
    monitor = RunMonitor()
    for event in [*step(0.0, 10.0, 1, reward=0.5), *step(10.0, 20.0, 2, reward=0.5)]:
        monitor(event)
    assert "20.00 s left" in panel_text(monitor, 20.0, steps=4)
    assert "15.00 s left" in panel_text(monitor, 25.0, steps=4)
    assert "this step 5.00 s" in panel_text(monitor, 25.0, steps=4)


def test_a_tick_draws_without_an_event_and_no_more_often_than_events_do() -> None:
    stream = io.StringIO()
    with LiveDisplay(RunMonitor(), Console(file=stream, force_terminal=True, width=100), refresh_s=1.0) as live:
        live.tick(0.0)
        drawn = stream.tell()
        live.tick(0.9)
        assert stream.tell() == drawn
        live.tick(1.0)
        assert stream.tell() > drawn


def test_without_a_terminal_a_run_says_every_ten_seconds_what_it_waits_for_until_its_first_step_is_done() -> None:
    monitor, stream = RunMonitor(), io.StringIO()
    live = LiveDisplay(monitor, Console(file=stream, force_terminal=False))
    live.tick(0.0)
    assert stream.getvalue() == ""
    live(ev(0.0, "run.begin", "run"))
    live.show(RunStatus(phase="starting", culprits=("trainer, engine/0",)))
    for now_s in range(30):
        live.tick(float(now_s))
    assert stream.getvalue().splitlines()[1:] == [f"[{s}.00 s] still starting: trainer, engine/0" for s in (10, 20)]
    live(ev(30.0, "run.ready", "run"))
    live.show(RunStatus(phase="training", culprits=("generate waits for engine/0 (for 10.0 s)",)))
    live.tick(39.0)
    live.tick(40.0)
    assert "step 1 is under way" in stream.getvalue() and "waits for engine/0" in stream.getvalue()
    before = stream.getvalue()
    for event in toy_run(steps=1):
        monitor(event)
        live(event)
    live.tick(monitor.clock.last_s + 59.0)
    assert len(stream.getvalue().splitlines()) == len(before.splitlines()) + 1
    live.tick(monitor.clock.last_s + 60.0)
    assert "step 2 is under way" in stream.getvalue()


def test_lines_and_panel_say_which_answers_have_no_verdict_and_whether_versions_are_mixed() -> None:
    failed = {"failed": 15, "fault": "ValueError: no", "mixed": True}
    event = ev(1, "validate.end", "validate", trained=5, reward=1.0, samples=5, **failed)
    stream = io.StringIO()
    monitor = RunMonitor()
    monitor(event)
    with LiveDisplay(monitor, Console(file=stream, force_terminal=False, width=200)) as live:
        live(event)
        panel = Console(width=200)
        with panel.capture() as shown:
            panel.print(live.panel(2.0))
    why = "15 of 20 answers without a verdict left out: ValueError: no"
    assert stream.getvalue() == f"[1 s] held-out (mixed versions) after step 5: 1.00 (5; {why})\n"
    assert "held-out (mixed versions) 1.00" in shown.get() and why in shown.get()


def test_lines_have_the_held_out_reward_when_there_was_one() -> None:
    stream = io.StringIO()
    monitor = RunMonitor()
    live = LiveDisplay(monitor, Console(file=stream, force_terminal=False, width=80))
    for event in training_run(steps=6, eval_steps=5):
        monitor(event)
        live(event)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [
        "starting trainer, engines and reward workers: they load the model",
        "[0 s] held-out after step 0: 0.100 (64)",
    ]
    assert [line for line in lines if "step 6:" in line and ", held-out 0.529," in line]
    assert [line for line in lines if "step 5:" in line and "held-out" not in line and "tokens/s" in line]


def test_a_line_says_when_a_step_was_filled_with_groups_that_teach_nothing() -> None:
    stream = io.StringIO()
    monitor = RunMonitor()
    live = LiveDisplay(monitor, Console(file=stream, force_terminal=False, width=80))
    for event in toy_run(steps=2):
        last = event.kind == "step.end" and event.data["trained"] == 2
        shown = ev(event.time_s, event.kind, event.who, **event.data, replaced=18, filled=1) if last else event
        monitor(shown)
        live(shown)
    first, second = [line for line in stream.getvalue().splitlines() if "] step " in line]
    groups = monitor.throughput.steps[-1].groups
    assert second.endswith(f", 1 of {groups} groups with equal rewards (18 were replaced)")
    assert "equal rewards" not in first


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert make_sparkline([]) == ""
    assert make_sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert make_sparkline([3, 3]) == "▄▄"
    assert len(make_sparkline(list(range(1000)), columns=20)) == 20


def test_a_line_says_once_that_trained_samples_are_not_like_started_ones() -> None:
    out = io.StringIO()
    monitor = RunMonitor()
    display = LiveDisplay(monitor, Console(file=out, width=200))
    for event in training_run(steps=6):
        monitor(event)
        display(event)
    lines = [line for line in out.getvalue().splitlines() if "shorter than the samples that were started" in line]
    assert len(lines) == 1 and "trained samples are 2.4% shorter" in lines[0]
    text = panel_text(monitor, 100.0)
    assert "length 400.0 of 410.0 started" in text and "trained samples are 2.4% shorter" in text
