"""Reading a JSON object field by field; what has the wrong type or range is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from headway.serving.refusals import Refused


class Fields:
    """One request's fields. `null` is as good as absent everywhere."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite number in [low, high]."""
        value = self._body.get(name)
        if value is None:
            return default
        right = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not right or not low <= value <= high:
            raise wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in [low, high]."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def truth(self, name: str) -> bool:
        """True only where it says so."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return bool(value)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text or a list of them, none empty."""
        value = self._body.get(name)
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or len(listed) > most or not all(isinstance(x, str) and x for x in listed):
            raise wrong(name, value, f"a text or a list of at most {most} texts")
        return tuple(listed)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(name, value, "an object")
        return dict(value or {})


def wrong(name: str, value: Any, wanted: str) -> Refused:
    """A field with a value that it cannot have."""
    shown = repr(value)
    return Refused(f"{name} = {shown if len(shown) <= 80 else shown[:80] + '…'}: must be {wanted}", param=name)
