"""A search tool that asks a retrieval server over HTTP, with the protocol of Search-R1.

The server gets `{"queries": […], "topk": 3, "return_scores": true}` and answers with the documents for each query.
A server that does not answer, after retries, ends the episode as failed.
"""

import json
from collections.abc import Sequence
from typing import Any

from headway.environments.tools.base import Tool, ToolArguments, ToolRefused
from headway.errors import EnvironmentFailed, RewardError
from headway.rewards.server_requests import ServerRequestError, normalise_url, post_json, retry_with_backoff
from headway.rewards.thread_limiter import ThreadLimiter

_PARAMETERS = {
    "type": "object",
    "properties": {"query_list": {"type": "array", "items": {"type": "string"}, "description": "Queries"}},
    "required": ["query_list"],
}


def make_retrieval_tool(
    *, url: str, most: int = 3, timeout_s: float = 30.0, concurrency: int = 64, retries: int = 3, pause_s: float = 1.0
) -> Tool:
    """Make a tool that answers with at most `most` documents for each query. Raises `ConfigError`."""
    address, threads = normalise_url(url, "url"), ThreadLimiter(concurrency, "retrieval")

    async def call(arguments: ToolArguments) -> str:
        given = arguments.get("query_list", arguments.get("query"))
        queries = [given] if isinstance(given, str) else given
        if not isinstance(queries, list) or not queries or not all(isinstance(one, str) for one in queries):
            raise ToolRefused("query_list must be a list of texts")
        body = {"queries": queries, "topk": most, "return_scores": True}

        async def attempt() -> str:
            payload = await threads.run(post_json, address, body, key=None, timeout_s=timeout_s, proxy=None)
            return format_documents(address, payload)

        try:
            return await retry_with_backoff(attempt, "search", retries=retries, pause_s=pause_s)
        except RewardError as error:
            raise EnvironmentFailed(str(error)) from error

    description = "Searches for documents; answers with the best ones for each query."
    return Tool(name="search", description=description, parameters=_PARAMETERS, call=call)


def format_documents(url: str, payload: bytes) -> str:
    """Return the documents of a server's answer as one text. Raises `ServerRequestError` if there are none to read."""
    try:
        found: Sequence[Sequence[Any]] = json.loads(payload)["result"]
        texts = [[str(one.get("document", one)["contents"]) for one in documents] for documents in found]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        start = payload[:200].decode(errors="replace")
        raise ServerRequestError(f"{url} answered something else than documents: {start}", 0.0) from None
    parts = (
        "\n\n".join(f"Doc {rank} (Title: {title})\n{text}" for rank, (title, _, text) in enumerate(documents, 1))
        for documents in ([text.partition("\n") for text in one] for one in texts)
    )
    return "\n---\n".join(parts).strip() or "No search results found."
