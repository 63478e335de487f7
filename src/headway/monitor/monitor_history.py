"""Fills a monitor with the past of a run from the index of its log, so that nothing is read twice."""

from __future__ import annotations

from headway.monitor.log_index import PartSummary
from headway.monitor.run_report import RunMonitor, ValidationResult
from headway.monitor.scalar_series import HELD_OUT_REWARD, MIXED_HELD_OUT_REWARD, ScalarPoint
from headway.monitor.throughput import StepRecord


def add_past_part(monitor: RunMonitor, part: PartSummary) -> None:
    """Add what a part of the log says: steps, validations, drops, faults and versions.

    Shares of time and histograms of lag, which the panel does not show, begin with the events that follow.
    """
    clock = monitor.clock
    if clock.first_s is None:
        clock.first_s = clock.opened_s = part.first_s
    clock.last_s = part.last_s
    clock.events += part.events
    for point in part.points:
        _add_point(monitor, point)
    dropped = {key[5:]: round(sum(counts)) for key, counts in part.series.items() if key.startswith("drop/")}
    monitor.lag.add_past_drops(dropped)
    monitor.incidents.faults.update({kind: count for kind, count in part.faults.items() if " " not in kind})
    monitor.lag.versions.load_state(part.state["meter"]["versions"])
    monitor.usage.states.update(part.state["states"])


def _add_point(monitor: RunMonitor, point: ScalarPoint) -> None:
    values, steps, validations = point.values, monitor.throughput.steps, monitor.incidents.validations
    if point.rewind:
        steps[:] = [step for step in steps if step.trained < point.step]
        validations[:] = [one for one in validations if one.trained < point.step]
    if point.is_held_out:
        reward = values.get(HELD_OUT_REWARD, values.get(MIXED_HELD_OUT_REWARD))
        mixed = MIXED_HELD_OUT_REWARD in values
        validations.append(
            ValidationResult(trained=point.step, time_s=point.time_s, reward=reward, samples=0, mixed=mixed)
        )
    elif values:
        spent_s = values.get("time/step_s", 0.0)
        steps.append(
            StepRecord(
                trained=point.step,
                end_s=point.time_s,
                seconds=spent_s,
                train_s=values.get("time/train_s", 0.0),
                groups=0,
                samples=round(values.get("throughput/samples_per_s", 0.0) * spent_s),
                actions=round(values.get("throughput/tokens_per_s", 0.0) * spent_s),
                reward=values.get("reward/train"),
                generated=round(values.get("throughput/generated_tokens_per_s", 0.0) * spent_s),
                lag=values.get("lag/mean", 0.0),
            )
        )
