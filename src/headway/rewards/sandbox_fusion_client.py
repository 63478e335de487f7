"""Programs run by a Sandbox Fusion server over HTTP, where a configuration names one instead of the local sandbox.

The server isolates the programs. A program that fails there has failed; a server that does not answer, or that reports
an error of its own, is a `SandboxBroken`, so that the sample is judged again.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

from headway.errors import RewardError
from headway.rewards.server_requests import ServerRequestError, normalise_url, post_json, retry_with_backoff
from headway.rewards.thread_limiter import ThreadLimiter
from headway.sandbox import ProgramEnding, ProgramOutcome, SandboxBroken, SandboxLimits

_ROUTE = "/run_code"
_SPARE_S = 10.0
"""Seconds that a request may take beyond the limits of its program."""


class SandboxFusionClient:
    """Runs programs on a server, at most `concurrency` of them at a time."""

    def __init__(self, url: str, *, concurrency: int = 64, retries: int = 2, pause_s: float = 1.0) -> None:
        address = normalise_url(url, "sandbox_url")
        self._url = address if address.endswith(_ROUTE) else address + _ROUTE
        self._threads = ThreadLimiter(concurrency, "sandbox fusion")
        self._retries, self._pause_s = retries, pause_s

    async def run_python(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramOutcome:
        """Run `code` on the server. Raises `SandboxBroken`."""
        limits = limits or SandboxLimits()
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin if isinstance(stdin, str) else stdin.decode(errors="replace"),
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {name: base64.b64encode(_to_bytes(text)).decode() for name, text in (files or {}).items()},
            "fetch_files": [],
        }

        async def attempt() -> ProgramOutcome:
            timeout_s = 2 * limits.wall_s + _SPARE_S
            payload = await self._threads.run(post_json, self._url, body, key=None, timeout_s=timeout_s, proxy=None)
            return _read_outcome(self._url, payload)

        try:
            return await retry_with_backoff(attempt, "sandbox", retries=self._retries, pause_s=self._pause_s)
        except RewardError as error:
            raise SandboxBroken(str(error)) from error


def _to_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _read_outcome(url: str, payload: bytes) -> ProgramOutcome:
    """Return what the server says about the program. Raises `ServerRequestError` if it says nothing."""
    try:
        answer: dict[str, Any] = json.loads(payload)
        failed = answer["status"] == "SandboxError"
        run: dict[str, Any] = answer.get("run_result") or answer.get("compile_result") or {}
        ending, code = run.get("status"), run.get("return_code")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        start = payload[:200].decode(errors="replace")
        raise ServerRequestError(f"{url} answered something else than a result: {start}", 0.0) from None
    if failed or ending is None:
        raise ServerRequestError(f"{url} could not run the program: {str(answer.get('message'))[:200]}", 0.0)
    late = ending == "TimeLimitExceeded"
    ended = ProgramEnding.TIMEOUT if late else ProgramEnding.EXITED
    return ProgramOutcome(
        ending=ended,
        exit_code=None if late or not isinstance(code, int) else code,
        signal=None,
        stdout=str(run.get("stdout") or ""),
        stderr=str(run.get("stderr") or ""),
        truncated=False,
        timed_out=late,
        cpu_s=0.0,
        wall_s=float(run.get("execution_time") or 0.0),
    )
