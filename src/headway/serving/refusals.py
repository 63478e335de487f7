"""What a client is told when it does not get what it asked for, in the form that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import HeadwayError

OVER = "session_over"
"""Code of calls that come after the end of their episode."""


class Refused(HeadwayError):
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


def too_long(tokens: int, room: int, param: str) -> Refused:
    """A prompt that leaves no room for an answer."""
    return Refused(
        f"This model's maximum context length is {room} tokens, and your prompt has {tokens}; an answer needs at "
        "least one more.",
        param=param,
        code="context_length_exceeded",
    )


def over(session: str) -> Refused:
    """The episode has ended; trying again does not help."""
    return Refused(f"session {session} is over", status=410, param="session", code=OVER)
