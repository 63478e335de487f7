"""One question to a server, over the OpenAI protocol or in plain JSON; blocking, with the standard library.

Follows no redirect (the key would go along), uses no proxy that was not asked for, reads no more than a megabyte.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from typing import Any

_MOST_BYTES = 1 << 20


class RewardServerError(Exception):
    """No answer. `again_in_s`: when the server wants to be asked again; `None` where asking again cannot help."""

    def __init__(self, problem: str, again_in_s: float | None) -> None:
        super().__init__(problem)
        self.again_in_s = again_in_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def request_completion(
    url: str, body: Mapping[str, Any], *, key: str | None, timeout_s: float, proxy: str | None
) -> str:
    """The text of the first choice. Raises `RewardServerError`."""
    return _content(url, post_json(url, body, key=key, timeout_s=timeout_s, proxy=proxy))


def post_json(url: str, body: Mapping[str, Any], *, key: str | None, timeout_s: float, proxy: str | None) -> bytes:
    """What the server answers to `body` as JSON. Raises `RewardServerError`."""
    headers = {"Content-Type": "application/json", "User-Agent": "headway"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with _opener(proxy).open(request, timeout=timeout_s) as response:
            payload: bytes = response.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        detail = error.read(500).decode(errors="replace").strip()
        raise RewardServerError(f"{url} answered {error.code} {error.reason}: {detail}", _wait(error)) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RewardServerError(f"{url}: {reason}", 0.0) from error
    return payload


@cache
def _opener(proxy: str | None) -> urllib.request.OpenerDirector:
    """Made once: since Python 3.12 each one reads the certificates of the machine, tens of milliseconds."""
    proxies = {"http": proxy, "https": proxy} if proxy else {}
    return urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _NoRedirect)


def _wait(error: urllib.error.HTTPError) -> float | None:
    """Overload and failures of the server pass; a wrong request does not."""
    if error.code not in (408, 409, 425, 429) and error.code < 500:
        return None
    try:
        return min(max(float(error.headers.get("Retry-After", "0")), 0.0), 60.0)
    except ValueError:
        return 0.0


def _content(url: str, payload: bytes) -> str:
    try:
        content = json.loads(payload)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        shown = payload[:200].decode(errors="replace")
        raise RewardServerError(f"{url} answered something else than a chat completion: {shown}", 0.0) from None
    if not isinstance(content, str):
        raise RewardServerError(f"{url} answered without a text", 0.0)
    return content
