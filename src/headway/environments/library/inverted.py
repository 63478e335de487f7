"""Foreign rollouts turned inside out: what asks a model over HTTP is answered turn by turn.

A small OpenAI-compatible endpoint on the loopback, below a path that nobody can guess. Whoever calls it waits until the
policy has acted. Calls are answered in the order that they came. Token ids and log-probabilities are not its affair:
what the policy said is passed on as text, and tool calls that are written in it as tool calls.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from headway.environments.tools.calls import Call, read_calls
from headway.environments.tools.extras import library
from headway.environments.tools.toolbox import FORMAT


class ModelCalls:
    """The endpoint and the calls that wait there."""

    def __init__(self) -> None:
        self._web = library("aiohttp.web", extra="serve", wanted_by="verifiers")
        self._path = f"/{secrets.token_urlsafe(16)}/v1"
        self._arrived: asyncio.Queue[tuple[Mapping[str, Any], asyncio.Future[str]]] = asyncio.Queue()
        self._waiting: asyncio.Future[str] | None = None
        self._runner: Any = None

    async def start(self) -> str:
        """Listen. Returns the base URL."""
        application = self._web.Application(client_max_size=16 << 20)
        application.router.add_post(f"{self._path}/chat/completions", self._called)
        self._runner = self._web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await self._web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}{self._path}"

    async def close(self) -> None:
        self.forget()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def following(self, rollout: asyncio.Task[Any]) -> Mapping[str, Any] | None:
        """The next call; `None` where the rollout ended first."""
        arriving = asyncio.ensure_future(self._arrived.get())
        try:
            await asyncio.wait({arriving, rollout}, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                return None
            body, self._waiting = arriving.result()
            return body
        finally:
            arriving.cancel()

    def answer(self, text: str) -> None:
        """What the policy said to the call that was taken last."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(text)
        self._waiting = None

    def forget(self) -> None:
        """Nobody will answer the calls that wait."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None
        while not self._arrived.empty():
            self._arrived.get_nowait()[1].cancel()

    async def _called(self, request: Any) -> Any:
        try:
            body = await request.json()
            messages = body["messages"]
            assert isinstance(messages, list) and messages
        except (ValueError, KeyError, TypeError, AssertionError):
            return self._web.json_response({"error": {"message": "no chat request"}}, status=400)
        said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._arrived.put_nowait((body, said))
        completion = completion_of(body, await said)
        if not body.get("stream"):
            return self._web.json_response(completion)
        chunk = {**completion, "object": "chat.completion.chunk"}
        chunk["choices"] = [{**one, "delta": one.pop("message")} for one in completion["choices"]]
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return self._web.Response(text=text, content_type="text/event-stream")


def completion_of(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """What the policy said, in OpenAI's form. Calls are read where tools were offered, and where all can be read."""
    read = read_calls(text) if body.get("tools") else None
    calls = [call for call in read.calls if isinstance(call, Call)] if read else []
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if read and calls and len(calls) == len(read.calls):
        message["content"] = read.text or None
        message["tool_calls"] = [_call(number, call) for number, call in enumerate(calls)]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", "headway"),
        "choices": [choice],
        "usage": usage,
    }


def new_text(body: Mapping[str, Any], *, first: bool) -> str:
    """What a call says that the policy has not read: everything, or what follows its last answer."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    if not first:
        last = max((place for place, one in enumerate(messages) if one.get("role") == "assistant"), default=-1)
        messages = messages[last + 1 :]
    parts = []
    if first and body.get("tools"):
        parts.append(FORMAT.format(signatures="\n".join(json.dumps(tool) for tool in body["tools"])))
    for message in messages:
        text = _text(message.get("content"))
        parts.append(f"<tool_response>\n{text}\n</tool_response>" if message.get("role") == "tool" else text)
    return "\n\n".join(part for part in parts if part)


def _call(number: int, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": f"call_{number}_{secrets.token_hex(4)}", "type": "function", "function": function}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
