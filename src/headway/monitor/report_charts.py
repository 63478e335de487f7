"""Defines the charts of the report page and makes their numbers, few enough to draw.

A chart is shown if one of its curves has a number that is not zero. Above `_MOST_POINTS` neighbouring steps are
averaged (or their maximum taken, if the curve is one of maxima), so that a long run keeps its shape.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from headway.monitor.scalar_series import HELD_OUT_REWARD, MIXED_HELD_OUT_REWARD, ScalarPoint

_MOST_POINTS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart. Its first curve is the one that is compared between runs."""

    title: str
    curves: tuple[tuple[str, str], ...]
    """Name of the series, and its label on the page. A name that ends with a slash stands for all that begin so."""
    note: str = ""
    kind: str = "line"
    """`line`, `reward` (with the held-out points), `lag` (with the bound), or `bars`, stacked from every series that
    begins with the name."""
    from_zero: bool = True


_ROWS = yaml.safe_load(files("headway.monitor").joinpath("charts.yaml").read_text(encoding="utf-8"))
CHARTS = tuple(Chart(**{**row, "curves": tuple(map(tuple, row["curves"]))}) for row in _ROWS)
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
    """Return all held-out rewards, with a label that says if one of them is of mixed versions."""
    scores = {HELD_OUT_REWARD, MIXED_HELD_OUT_REWARD}
    rows = sorted((point for point in points if scores & point.values.keys()), key=lambda point: point.step)
    mixed = any(MIXED_HELD_OUT_REWARD in row.values for row in rows)
    return {
        "label": "held-out (mixed versions)" if mixed else "held-out",
        "step": [row.step for row in rows],
        "time": [round(row.time_s, 3) for row in rows],
        "value": [row.values[(scores & row.values.keys()).pop()] for row in rows],
    }


def _merge_points(name: str, bucket: Sequence[ScalarPoint]) -> float | None:
    known = [value for point in bucket if (value := point.values.get(name)) is not None and math.isfinite(value)]
    if not known:
        return None
    value = max(known) if name.endswith("max") else sum(known) / len(known)
    return float(f"{value:.6g}")
