"""Ranges that live beside the field they bound, as annotations: `steps: Count = 6`.

An alias names the kind of number; the loader enforces it, `describe` puts it into error messages, and a test
walks every field. Plain assignment is not checked: configurations are made by `headway.config.load`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

_HUGE = 10**15
"""Beyond every number a configuration can mean; keeps the arithmetic on them exact and finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """An interval of numbers, open or closed at either end."""

    ge: float | None = None
    """Smallest value allowed."""
    gt: float | None = None
    """Every value allowed is larger."""
    le: float | None = None
    """Largest value allowed."""
    lt: float | None = None
    """Every value allowed is smaller."""

    def holds(self, value: float) -> bool:
        """Whether `value` is finite and inside."""
        return (
            -_HUGE < value < _HUGE
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def describe(self) -> str:
        """Such as `≥ 0 and ≤ 1`."""
        ends = (("≥", self.ge), (">", self.gt), ("≤", self.le), ("<", self.lt))
        return " and ".join(f"{sign} {end:g}" for sign, end in ends if end is not None)


@dataclass(frozen=True, slots=True)
class DeviceList:
    """Marks a list of device numbers, which may also be written as the text `list(range(a,b))`."""


Count = Annotated[int, Range(ge=1)]
"""How many, at least one."""
Amount = Annotated[int, Range(ge=0)]
"""How many, possibly none."""
Real = Annotated[float, Range(ge=0)]
"""A number that is not negative."""
Signed = Annotated[float, Range(ge=-1000, le=1000)]
"""A number of either sign."""
Steps = Annotated[float, Range(ge=0, le=1000)]
"""How many training steps ahead, fractions included."""
Positive = Annotated[float, Range(gt=0)]
"""A number that is not zero either."""
Probability = Annotated[float, Range(ge=0, le=1)]
"""From 0 to 1, both included."""
Share = Annotated[float, Range(gt=0, le=1)]
"""A part of a whole: not nothing."""
Discount = Annotated[float, Range(ge=0, le=1)]
"""γ or λ."""
Factor = Annotated[float, Range(ge=1)]
"""How many times as much."""
Seconds = Annotated[float, Range(gt=0)]
"""A deadline or a period."""
NodeSize = Annotated[int, Range(ge=1, le=1024)]
"""Devices of one node."""
Nodes = Annotated[int, Range(ge=1, le=1000)]
"""Nodes of a cluster."""
Devices = Annotated[tuple[Annotated[int, Range(ge=0, lt=1_000_000)], ...], DeviceList()]
"""Global device numbers; node n holds those from n·num_gpus_per_node."""
