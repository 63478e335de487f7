"""Speed and reward against hand-made runs with known answers."""

from __future__ import annotations

import pytest

from headway.monitor.event_log import LoggedEvent
from headway.monitor.report_tables import make_summary_rows
from headway.monitor.run_report import make_run_report
from headway.monitor.throughput import compute_quantile

from .factory import ev, in_order, step


def consume(time_s: float, group: int, trained: int, samples: int = 4, actions: int = 100) -> list:
    return [
        ev(time_s, "group.train", "train", group=group, trained=trained, oldest=trained, in_flight=0, in_queue=0,
           samples=samples, actions=actions),
    ]  # fmt: skip


def test_rates_are_of_the_window_and_counts_of_the_whole_run() -> None:
    events = in_order(
        step(0, 10, 1), consume(1, 1, 0), step(10, 14, 2), consume(11, 2, 1), step(18, 20, 3), consume(19, 3, 2)
    )
    speed = make_run_report(events, warmup_steps=1).throughput
    assert [s.seconds for s in speed.steps] == [10, 4, 6]
    assert [s.train_s for s in speed.steps] == [10, 4, 2]
    assert (speed.samples, speed.actions) == (12, 300)
    assert speed.samples_per_s == pytest.approx(0.8)
    assert speed.actions_per_s == pytest.approx(20)
    assert (speed.step_mean_s, speed.step_p50_s) == (5, 5)
    assert speed.step_p95_s == pytest.approx(5.9)
    assert speed.train_mean_s == pytest.approx(3)


def test_the_reward_of_a_step_is_weighted_by_samples() -> None:
    events = [
        ev(0, "group.ready", "reward", group=1, reward=1.0),
        ev(0, "group.ready", "reward", group=2, reward=0.0),
        ev(0, "group.ready", "reward", group=3, reward=9.0),
        *consume(1, 1, 0, samples=3),
        *consume(1, 2, 0, samples=1),
        ev(2, "step.end", "train", trained=1, groups=2),
    ]
    speed = make_run_report(events).throughput
    assert speed.steps[0].reward == pytest.approx(0.75)
    assert speed.steps[0].groups == 2


def test_without_announced_rewards_the_metric_of_the_step_is_taken() -> None:
    events = [*step(0, 1, 1, reward=0.5), *step(1, 2, 2, reward=float("nan"))]
    assert [s.reward for s in make_run_report(events).throughput.steps] == [0.5, None]


def test_operations_are_those_of_the_time_spent_training() -> None:
    said = {"train/tflop": 300.0, "train/peak_tflops": 1000.0}
    report = make_run_report([*step(0, 2, 1, **said), *step(5, 6, 2, **said)], warmup_steps=0)
    assert report.throughput.train_tflops == pytest.approx(200) and report.throughput.mfu == pytest.approx(0.2)
    assert "MFU 20.0%" in next(row.note for row in make_summary_rows(report) if row.name == "training")
    silent = make_run_report([*step(0, 2, 1)], warmup_steps=0)
    assert silent.throughput.mfu == 0 and "training" not in [row.name for row in make_summary_rows(silent)]


def test_a_run_without_steps_has_no_speed() -> None:
    speed = make_run_report([ev(3, "group.start", "generate", group=1, position=0, served=0)]).throughput
    assert (speed.steps, speed.samples_per_s, speed.step_p95_s, speed.reward_last) == ((), 0.0, 0.0, None)


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.5, 2.5), (1, 4)])
def test_quantiles_are_linear_between_neighbours(share: float, value: float) -> None:
    assert compute_quantile([1, 2, 3, 4], share) == pytest.approx(value)


def test_a_step_knows_the_lag_of_its_samples_and_what_was_made_meanwhile() -> None:
    def group(oldest: int, samples: int) -> LoggedEvent:
        return ev(
            1, "group.train", "train", group=oldest, trained=4, oldest=oldest, in_flight=0, in_queue=4 - oldest,
            samples=samples, actions=0,
        )  # fmt: skip

    made = [ev(0, "request.end", "engine/0", request=n, actions=7, finish="stop") for n in range(2)]
    begin, end = step(1, 2, 5)
    (record,) = make_run_report([*made, begin, group(4, 1), group(2, 3), end]).throughput.steps
    assert (record.lag, record.generated) == (1.5, 14)
