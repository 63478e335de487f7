"""The curves of a run as columns of numbers: a step costs eight bytes a curve, and any stretch is thinned at once.

Steps that were lost in a crash and made again count as what they became.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from headway.monitor.scalar_series import HELD_OUT_REWARD, MIXED_HELD_OUT_REWARD, ScalarPoint

_REMEMBERED_CHANGES = 512
_NO_NUMBER = float("nan")


class CurveColumns:
    """All points of a run, in the order of steps."""

    def __init__(self) -> None:
        self.steps, self.times = array("q"), array("d")
        self._columns: dict[str, array[float]] = {}
        self.held_out: dict[int, ScalarPoint] = {}
        self.changes = 0
        """Number of points added so far, lost ones included."""
        self._recent: deque[tuple[int, ScalarPoint]] = deque(maxlen=_REMEMBERED_CHANGES)

    def add(self, point: ScalarPoint) -> None:
        """Add a point, in the order of the log."""
        self.changes += 1
        self._recent.append((self.changes, point))
        if point.rewind:
            place = bisect_left(self.steps, point.step)
            del self.steps[place:]
            for column in (self.times, *self._columns.values()):
                del column[place:]
            for step in [step for step in self.held_out if step >= point.step]:
                del self.held_out[step]
        if point.is_held_out:
            self.held_out[point.step] = point
        elif point.values:
            self._append(point)

    def _append(self, point: ScalarPoint) -> None:
        size = len(self.steps)
        for name, value in point.values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d", [_NO_NUMBER]) * size
            column.append(value)
        if len(point.values) < len(self._columns):
            for column in self._columns.values():
                if len(column) == size:
                    column.append(_NO_NUMBER)
        self.steps.append(point.step)
        self.times.append(point.time_s)

    def since(self, changes: int) -> list[dict[str, Any]] | None:
        """Return the points that were added after so many, or None if they are too many to tell."""
        if changes < self.changes - len(self._recent):
            return None
        return [_point_to_json(point) for number, point in self._recent if number > changes]

    def last(self, name: str, count: int = 1) -> list[float]:
        """Return the last known numbers of a curve."""
        return [value for value in self._columns.get(name, array("d"))[-count:] if math.isfinite(value)]

    def total(self, name: str) -> float:
        """Return the sum of a curve."""
        return float(np.nansum(np.array(self._columns.get(name, array("d")))))

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def thin(self, first: int | None = None, last: int | None = None, most: int = 1000) -> dict[str, Any]:
        """Return steps, times and every curve between two steps; neighbours are averaged if there are too many."""
        begin = 0 if first is None else bisect_left(self.steps, first)
        end = len(self.steps) if last is None else bisect_left(self.steps, last + 1)
        size = max(1, -(-(end - begin) // most))
        places = range(begin + size - 1, end + size - 1, size)
        series = {name: _join(name, column[begin:end], size) for name, column in self._columns.items()}
        return {
            "step": [self.steps[min(place, end - 1)] for place in places],
            "time": [round(self.times[min(place, end - 1)], 3) for place in places],
            "joined": size,
            "series": {name: values for name, values in series.items() if any(value is not None for value in values)},
        }

    def thin_curve(self, name: str, most: int) -> list[float | None]:
        """Return one curve with at most so many points."""
        column = self._columns.get(name, array("d"))
        return _join(name, column, max(1, -(-len(column) // most)))

    def held_out_rows(self) -> list[dict[str, Any]]:
        """Return what validations found, in the order of steps."""
        return [_point_to_json(self.held_out[step]) for step in sorted(self.held_out)]

    def held_out_rewards(self) -> list[tuple[int, float]]:
        """Return step and reward of each validation that has one."""
        names = (HELD_OUT_REWARD, MIXED_HELD_OUT_REWARD)
        found = [(step, self.held_out[step].values) for step in sorted(self.held_out)]
        return [(step, values[name]) for step, values in found for name in names if name in values]


def _join(name: str, values: array[float], size: int) -> list[float | None]:
    numbers = np.array(values)
    if size > 1:
        padded = np.append(numbers, np.full(-len(numbers) % size, _NO_NUMBER)).reshape(-1, size)
        known = np.isfinite(padded)
        if name.endswith("max"):
            numbers = np.where(known.any(1), np.where(known, padded, -np.inf).max(1), _NO_NUMBER)
        else:
            count = known.sum(1)
            sums = np.where(known, padded, 0.0).sum(1)
            numbers = np.where(count > 0, sums / np.maximum(count, 1), _NO_NUMBER)
            if name.startswith(("drops/", "lag_samples/")):
                numbers = numbers * count
    return round_numbers(numbers.tolist())


def round_numbers(values: Iterable[float]) -> list[float | None]:
    """Return numbers short enough to be sent; None for those that JSON does not have."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def _point_to_json(point: ScalarPoint) -> dict[str, Any]:
    values = {name: value for name, value in point.values.items() if math.isfinite(value)}
    time_s = round(point.time_s, 3)
    return {"step": point.step, "time": time_s, "rewind": point.rewind, "held_out": point.is_held_out, "values": values}
