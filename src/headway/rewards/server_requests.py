"""HTTP requests of rewards and tools to servers, over the OpenAI protocol or in plain JSON, by the standard library.

Requests block and belong on a thread. They follow no redirect (the API key would go along), use no proxy that the
configuration does not name, and read at most a megabyte. `retry_with_backoff` repeats what may succeed later.
"""

import asyncio
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from headway.errors import ConfigError, RewardError

T = TypeVar("T")

_MAX_BYTES = 1 << 20


class ServerRequestError(Exception):
    """A request without an answer. `retry_in_s` is the wait that the server asks for; `None`: a retry cannot help."""

    def __init__(self, problem: str, retry_in_s: float | None) -> None:
        super().__init__(problem)
        self.retry_in_s = retry_in_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def normalise_url(url: str, key: str) -> str:
    """Return a server's address without a slash at its end. Raises `ConfigError` if it is not HTTP."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError("must begin with http:// or https://", key=key, value=url)
    return url.rstrip("/")


def read_api_key(variable: str | None) -> str | None:
    """Return the key in a variable of the environment. Raises `ConfigError` if it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError("is not set", key="api_key_env", value=variable, hint=f"export {variable}=…")
    return os.environ[variable]


async def retry_with_backoff(attempt: Callable[[], Awaitable[T]], name: str, *, retries: int, pause_s: float) -> T:
    """Return the result of `attempt`, repeated with growing pauses if that may help. Raises `RewardError`."""
    problem = ""
    for number in range(retries + 1):
        pause = pause_s * 2**number
        try:
            return await attempt()
        except ServerRequestError as failed:
            problem = str(failed)
            if failed.retry_in_s is None:
                break
            pause = max(pause, failed.retry_in_s)
        except ValueError as error:
            problem = str(error)
        if number < retries:
            await asyncio.sleep(pause)
    raise RewardError(f"{name}: {problem}")


def request_completion(
    url: str, body: Mapping[str, Any], *, key: str | None, timeout_s: float, proxy: str | None
) -> str:
    """Return the text of the first choice. Raises `ServerRequestError`."""
    return _parse_completion(url, post_json(url, body, key=key, timeout_s=timeout_s, proxy=proxy))


def post_json(url: str, body: Mapping[str, Any], *, key: str | None, timeout_s: float, proxy: str | None) -> bytes:
    """Return the server's answer to `body`. Raises `ServerRequestError`."""
    headers = {"Content-Type": "application/json", "User-Agent": "headway"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request, deadline_s = urllib.request.Request(url, json.dumps(body).encode(), headers), time.monotonic() + timeout_s
    try:
        try:
            with _make_opener(proxy).open(request, timeout=timeout_s) as response:
                return _read_answer(response, _MAX_BYTES, deadline_s)
        except urllib.error.HTTPError as error:
            detail = _read_answer(error, 500, deadline_s).decode(errors="replace").strip()
            problem = f"{url} answered {error.code} {error.reason}: {detail}"
            raise ServerRequestError(problem, _retry_delay(error)) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", "") or error or type(error).__name__
        raise ServerRequestError(f"{url}: {reason}", 0.0) from error


def _read_answer(response: Any, limit: int, deadline_s: float) -> bytes:
    """Return what a server sends, up to `limit`. One that sends a byte now and then is late in the end, too."""
    payload = b""
    while len(payload) < limit and (part := response.read1(min(limit, 65536))):
        payload += part
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the answer had not ended in time, after {len(payload)} bytes")
    missing = getattr(response, "length", None)
    if len(payload) < limit and missing:
        raise OSError(f"the connection ended after {len(payload)} bytes of an answer")
    return payload[:limit]


@cache
def _make_opener(proxy: str | None) -> urllib.request.OpenerDirector:
    """Return the cached opener: since Python 3.12 each new one reads the machine's certificates, for milliseconds."""
    proxies = {"http": proxy, "https": proxy} if proxy else {}
    return urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _NoRedirect)


def _retry_delay(error: urllib.error.HTTPError) -> float | None:
    """Return the delay for overload and server failures, which pass; `None` for a wrong request, which does not."""
    if error.code not in (408, 409, 425, 429) and error.code < 500:
        return None
    try:
        return min(max(float(error.headers.get("Retry-After", "0")), 0.0), 60.0)
    except ValueError:
        return 0.0


def _parse_completion(url: str, payload: bytes) -> str:
    try:
        content = json.loads(payload)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        start = payload[:200].decode(errors="replace")
        raise ServerRequestError(f"{url} answered something else than a chat completion: {start}", 0.0) from None
    if not isinstance(content, str):
        raise ServerRequestError(f"{url} answered without a text", 0.0)
    return content
