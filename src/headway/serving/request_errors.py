"""Refused requests in the form that OpenAI's clients understand, and typed access to a request's JSON fields."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from headway.errors import HeadwayError

SESSION_OVER_CODE = "session_over"
"""Error code of requests that arrive after the end of their episode."""


class RequestRefused(HeadwayError):
    """A request that is not answered. `status` is the HTTP status; clients retry 409, 429 and 5xx by themselves."""

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


def context_length_exceeded(tokens: int, context_tokens: int, param: str) -> RequestRefused:
    """Return the refusal of a prompt that leaves no room for an answer."""
    return RequestRefused(
        f"This model's maximum context length is {context_tokens} tokens, and your prompt has {tokens}; an answer "
        "needs at least one more.",
        param=param,
        code="context_length_exceeded",
    )


def session_over(session_id: str) -> RequestRefused:
    """Return the refusal of a request whose episode has ended, so that retrying is useless."""
    return RequestRefused(f"session {session_id} is over", status=410, param="session", code=SESSION_OVER_CODE)


def too_many_requests(message: str, *, retry_after_s: int) -> RequestRefused:
    """Return the refusal of a request that the client should send again later."""
    return RequestRefused(
        message,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_after_s)},
    )


def wrong_api_key() -> RequestRefused:
    """Return the refusal of a request without the right key."""
    return RequestRefused("wrong API key", status=401, kind="authentication_error", code="invalid_api_key")


def invalid_field(name: str, value: Any, expected: str) -> RequestRefused:
    """Return the refusal of a field whose value has the wrong type or range."""
    shown = repr(value)
    return RequestRefused(f"{name} = {shown if len(shown) <= 80 else shown[:80] + '…'}: must be {expected}", param=name)


class RequestFields:
    """The JSON fields of one request; `null` counts as absent. A wrong type or range raises `RequestRefused`."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def _read(self, name: str, is_valid: Callable[[Any], bool], expected: str) -> Any:
        value = self._body.get(name)
        if value is not None and not is_valid(value):
            raise invalid_field(name, value, expected)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a finite number in [low, high]."""

        def is_valid(value: Any) -> bool:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and isfinite(value) and low <= value <= high

        value = self._read(name, is_valid, f"a number from {low:g} to {high:g}")
        return default if value is None else float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return a whole number in [low, high], or `None` if it is absent."""
        expected = f"a whole number from {low} to {high}"
        value = self._read(name, lambda value: type(value) is int and low <= value <= high, expected)
        return None if value is None else int(value)

    def boolean(self, name: str) -> bool:
        """Return a boolean; an absent field is false."""
        return bool(self._read(name, lambda value: isinstance(value, bool), "true or false"))

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a non-empty text, or a list of at most `most` of them, as a tuple."""

        def is_valid(value: Any) -> bool:
            listed = [value] if isinstance(value, str) else value
            return isinstance(listed, list) and len(listed) <= most and all(isinstance(x, str) and x for x in listed)

        value = self._read(name, is_valid, f"a text or a list of at most {most} texts")
        return (value,) if isinstance(value, str) else tuple(value or ())

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a JSON object; an absent field is an empty one."""
        return dict(self._read(name, lambda value: isinstance(value, dict), "an object") or {})
