"""What a client is told when it does not get what it asked for, in the form that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from headway.errors import HeadwayError

SESSION_OVER_CODE = "session_over"
"""Code of calls that come after the end of their episode."""


class RequestRefused(HeadwayError):
    """A request that is not answered. `status` is HTTP's; clients try 409, 429 and 5xx again by themselves."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def context_length_exceeded(tokens: int, room: int, param: str) -> RequestRefused:
    """A prompt that leaves no room for an answer."""
    return RequestRefused(
        f"This model's maximum context length is {room} tokens, and your prompt has {tokens}; an answer needs at "
        "least one more.",
        param=param,
        code="context_length_exceeded",
    )


def session_over(session: str) -> RequestRefused:
    """The episode has ended; trying again does not help."""
    return RequestRefused(f"session {session} is over", status=410, param="session", code=SESSION_OVER_CODE)


class RequestFields:
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
            raise invalid_field(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in [low, high]."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid_field(name, value, f"a whole number from {low} to {high}")
        return value

    def truth(self, name: str) -> bool:
        """True only where it says so."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise invalid_field(name, value, "true or false")
        return bool(value)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text or a list of them, none empty."""
        value = self._body.get(name)
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or len(listed) > most or not all(isinstance(x, str) and x for x in listed):
            raise invalid_field(name, value, f"a text or a list of at most {most} texts")
        return tuple(listed)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            raise invalid_field(name, value, "an object")
        return dict(value or {})


def invalid_field(name: str, value: Any, wanted: str) -> RequestRefused:
    """A field with a value that it cannot have."""
    shown = repr(value)
    return RequestRefused(f"{name} = {shown if len(shown) <= 80 else shown[:80] + '…'}: must be {wanted}", param=name)
