"""Defines the charts of the report page and makes their numbers, few enough to draw.

A chart is shown if one of its curves has a number that is not zero. Above `_MOST_POINTS` neighbouring steps are
averaged (or their maximum taken, if the curve is one of maxima), so that a long run keeps its shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.monitor.scalar_series import HELD_OUT_REWARD, ScalarPoint

_MOST_POINTS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart. Its first curve is the one that is compared between runs."""

    title: str
    curves: tuple[tuple[str, str], ...]
    """Name of the series, and its label on the page."""
    note: str = ""
    kind: str = "line"
    """`line`, `reward` (with the held-out points), `lag` (with the bound), or `bars`, stacked from every series that
    begins with the name."""
    from_zero: bool = True


CHARTS = (
    Chart(title="Reward", curves=(("reward/train", "training"),), kind="reward", from_zero=False),
    Chart(title="Episodes that succeed", curves=(("episode/success", "share"),), note="of all that ended in a step"),
    Chart(title="Malformed actions", curves=(("episode/invalid", "share of the turns"),)),
    Chart(title="Turns of an episode", curves=(("episode/turns", "mean"),)),
    Chart(
        title="Lag of trained samples",
        curves=(("lag/mean", "mean"), ("lag/max", "max")),
        note="in versions; dashed: what α allows",
        kind="lag",
    ),
    Chart(
        title="Tokens per second",
        curves=(("throughput/tokens_per_s", "trained"), ("throughput/generated_tokens_per_s", "generated")),
    ),
    Chart(
        title="Seconds per step",
        curves=(("time/step_s", "whole step"), ("time/train_s", "training")),
        note="the gap is what the trainer waited",
    ),
    Chart(title="Response length", curves=(("response/length", "tokens"),), note="mean of trained samples"),
    Chart(title="Answers cut off", curves=(("response/truncated", "share"),), note="requests that hit the limit"),
    Chart(title="Entropy", curves=(("train/entropy", "entropy"),)),
    Chart(title="Gradient norm", curves=(("train/grad_norm", "before clipping"),)),
    Chart(
        title="Distance to the policy that acted",
        curves=(("train/behaviour_kl", "KL"), ("train/mismatch_kl", "trainer / engine")),
    ),
    Chart(title="KL loss", curves=(("train/kl_loss", "KL to the reference"),)),
    Chart(title="Clipped actions", curves=(("train/clip_fraction", "clipped"), ("train/dropped_fraction", "dropped"))),
    Chart(title="Effective sample size", curves=(("train/ess", "share of the batch"),)),
    Chart(title="Loss", curves=(("train/loss", "loss"), ("train/value_loss", "value loss")), from_zero=False),
    Chart(title="Learning rate", curves=(("train/learning_rate", "learning rate"),)),
    Chart(title="Groups with spread", curves=(("groups/with_spread", "share"),), note="rewards that differ teach"),
    Chart(title="Samples dropped", curves=(("drops/", ""),), note="in each step, by reason", kind="bars"),
)
_PREFIXES = tuple(name for chart in CHARTS for name, _ in chart.curves)


def make_chart_columns(points: Iterable[ScalarPoint]) -> dict[str, Any]:
    """Return steps, times and a column for every drawn series, with None for a step without a number."""
    rows = sorted(points, key=lambda point: point.step)
    size = -(-len(rows) // _MOST_POINTS) or 1
    buckets = [rows[first : first + size] for first in range(0, len(rows), size)]
    names = dict.fromkeys(name for row in rows for name in row.values if name.startswith(_PREFIXES))
    series = {name: [_merge_points(name, bucket) for bucket in buckets] for name in names}
    return {
        "step": [bucket[-1].step for bucket in buckets],
        "time": [round(bucket[-1].time_s, 3) for bucket in buckets],
        "joined": size,
        "series": {name: values for name, values in series.items() if any(value is not None for value in values)},
    }


def make_held_out_series(points: Iterable[ScalarPoint]) -> dict[str, Any]:
    """Return all held-out rewards."""
    rows = sorted(points, key=lambda point: point.step)
    return {
        "step": [row.step for row in rows],
        "time": [round(row.time_s, 3) for row in rows],
        "value": [row.values[HELD_OUT_REWARD] for row in rows],
    }


def _merge_points(name: str, bucket: Sequence[ScalarPoint]) -> float | None:
    known = [value for point in bucket if (value := point.values.get(name)) is not None and math.isfinite(value)]
    if not known:
        return None
    value = max(known) if name.endswith("max") else sum(known) / len(known)
    return float(f"{value:.6g}")
