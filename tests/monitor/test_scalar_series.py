"""The numbers of a step, by hand, and what a crash takes back."""

from __future__ import annotations

import pytest

from headway.monitor.event_log import LoggedEvent
from headway.monitor.report_charts import make_held_out_series
from headway.monitor.scalar_series import compute_scalars
from tests.monitor.factory import ev, resumed_run, training_run


def group(time_s: float, trained: int, oldest: int, samples: int, actions: int) -> LoggedEvent:
    return ev(
        time_s, "group.train", "train", group=int(time_s), trained=trained, oldest=oldest, in_flight=0,
        in_queue=trained - oldest, samples=samples, actions=actions,
    )  # fmt: skip


def one_step() -> list[LoggedEvent]:
    return [
        ev(100, "run.begin", "run", resumed=True, trained=6),
        ev(101, "request.end", "engine/0", request="a", actions=30, finish="stop"),
        ev(102, "request.end", "engine/0", request="b", actions=50, finish="length"),
        ev(102, "group.ready", "reward", group=1, reward=0.5),
        ev(103, "group.drop", "reward", group=2, reason="zero_variance"),
        ev(103, "sample.end", "reward", sample="x", end="dropped", reason="zero_variance"),
        ev(103, "sample.end", "train", sample="y", end="trained"),
        ev(106, "step.begin", "train", trained=6, groups=2),
        group(106, 6, 6, 2, 20),
        group(106, 6, 4, 6, 60),
        ev(110, "step.end", "train", trained=7, groups=2, reward=0.25, **{"train/loss": -0.5, "note": "text"}),
    ]


def test_every_number_of_a_step_is_what_its_name_says() -> None:
    begin, point = compute_scalars(one_step())
    assert (begin.step, begin.rewind, begin.values) == (7, True, {})
    assert (point.step, point.time_s, point.rewind) == (7, 110, False)
    assert point.values == pytest.approx(
        {
            "reward/train": 0.25,
            "time/step_s": 10,
            "time/train_s": 4,
            "time/wait_s": 6,
            "lag/mean": 1.5,
            "lag/max": 2,
            "lag/served_behind": 0,
            "response/length": 10,
            "throughput/samples_per_s": 0.8,
            "throughput/tokens_per_s": 8,
            "throughput/generated_tokens_per_s": 8,
            "response/truncated": 0.5,
            "groups/with_spread": 0.5,
            "drops/zero_variance": 1,
            "train/loss": -0.5,
        }
    )


def test_a_group_with_equal_rewards_that_fills_a_step_has_no_spread() -> None:
    events = one_step()
    events[3] = ev(102, "group.ready", "reward", group=1, reward=0.5, equal=True)
    events[-1] = ev(110, "step.end", "train", trained=7, groups=2, replaced=1, filled=1)
    *_, point = compute_scalars(events)
    assert point.values["groups/with_spread"] == 0.0
    assert (point.values["groups/replaced"], point.values["groups/filled"]) == (1, 1)


def test_counts_start_again_with_every_step_and_a_known_reason_goes_to_zero() -> None:
    events = [*one_step(), *[LoggedEvent(event.time_s + 10, event.event) for event in one_step()[7:]]]
    events[-1] = ev(120, "step.end", "train", trained=8, groups=2)
    *_, last = compute_scalars(events)
    assert last.values["drops/zero_variance"] == 0
    assert last.values["lag/max"] == 2
    assert "response/truncated" not in last.values
    assert "reward/train" not in last.values


def test_a_validation_belongs_to_the_version_it_judged() -> None:
    (point,) = compute_scalars([ev(9, "validate.end", "validate", trained=3, reward=0.5, samples=8)])
    assert (point.step, point.values) == (3, {"reward/held_out": 0.5})
    assert not list(compute_scalars([ev(9, "validate.end", "validate", trained=3, reward=None, samples=0)]))


def test_answers_without_a_verdict_have_a_curve_of_their_own_and_make_no_score() -> None:
    some = ev(9, "validate.end", "validate", trained=3, reward=1.0, samples=5, failed=15, fault="ValueError: no")
    none = ev(9, "validate.end", "validate", trained=4, reward=0.0, samples=0, failed=20, fault="ValueError: no")
    first, second = compute_scalars([some, none])
    assert first.values == {"reward/held_out": 1.0, "held_out/failed": 0.75} and first.is_held_out
    assert second.values == {"held_out/failed": 1.0} and second.is_held_out


def test_a_score_of_mixed_versions_is_another_curve() -> None:
    (point,) = compute_scalars([ev(9, "validate.end", "validate", trained=3, reward=0.5, samples=8, mixed=True)])
    assert point.values == {"reward/held_out_mixed": 0.5} and point.is_held_out
    assert make_held_out_series([point])["label"] == "held-out (mixed versions)"


def test_a_resumed_run_takes_back_what_it_does_not_go_on_from() -> None:
    rewinds = [point.step for point in compute_scalars(resumed_run(first=12, back_to=10)) if point.rewind]
    assert rewinds == [0, 11]


def test_a_trainer_that_was_lost_takes_its_steps_back() -> None:
    events = training_run(steps=5)
    again = [LoggedEvent(event.time_s + 500, event.event) for event in events if event.kind.startswith("step.")][4:6]
    points = list(compute_scalars([*events, *again]))
    assert points[-1].step == 3
    assert points[-1].rewind


def test_numbers_that_are_none_come_through_as_they_are() -> None:
    (point,) = compute_scalars(
        [ev(1, "step.end", "train", trained=1, **{"train/loss": float("nan"), "train/on": True})]
    )
    assert point.values["train/loss"] != point.values["train/loss"]
    assert "train/on" not in point.values
