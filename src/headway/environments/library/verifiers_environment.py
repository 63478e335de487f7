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
from itertools import islice
from typing import Any

from headway.environments.optional_dependencies import import_optional_library
from headway.environments.response_parsing import ParsedToolCall, parse_tool_calls
from headway.environments.text_environment import Reply
from headway.environments.tools.toolbox import TOOL_PROMPT_FORMAT
from headway.errors import ConfigError, EnvironmentFailed


class ModelCallEndpoint:
    """The endpoint and the calls that wait there."""

    def __init__(self) -> None:
        self._web = import_optional_library("aiohttp.web", extra="serve", wanted_by="verifiers")
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
        completion = make_completion_body(body, await said)
        if not body.get("stream"):
            return self._web.json_response(completion)
        chunk = {**completion, "object": "chat.completion.chunk"}
        chunk["choices"] = [{**one, "delta": one.pop("message")} for one in completion["choices"]]
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return self._web.Response(text=text, content_type="text/event-stream")


def make_completion_body(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """What the policy said, in OpenAI's form. Calls are read where tools were offered, and where all can be read."""
    read = parse_tool_calls(text) if body.get("tools") else None
    calls = [call for call in read.calls if isinstance(call, ParsedToolCall)] if read else []
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if read and calls and len(calls) == len(read.calls):
        message["content"] = read.text or None
        message["tool_calls"] = [_make_tool_call_body(number, call) for number, call in enumerate(calls)]
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


def format_new_messages(body: Mapping[str, Any], *, first: bool) -> str:
    """What a call says that the policy has not read: everything, or what follows its last answer."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    if not first:
        last = max((place for place, one in enumerate(messages) if one.get("role") == "assistant"), default=-1)
        messages = messages[last + 1 :]
    parts = []
    if first and body.get("tools"):
        parts.append(TOOL_PROMPT_FORMAT.format(signatures="\n".join(json.dumps(tool) for tool in body["tools"])))
    for message in messages:
        text = _content_to_text(message.get("content"))
        parts.append(f"<tool_response>\n{text}\n</tool_response>" if message.get("role") == "tool" else text)
    return "\n\n".join(part for part in parts if part)


def _make_tool_call_body(number: int, call: ParsedToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": f"call_{number}_{secrets.token_hex(4)}", "type": "function", "function": function}


def _content_to_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


_MAX_TASKS = 100_000
"""Of a taskset that never ends, as many tasks are told apart."""


class VerifiersEnvironment:
    """`taskset`: id of an installed one; `config`: the rest of what the library calls `[env]`, such as `agent`."""

    reusable = True

    def __init__(self, *, taskset: str, config: Mapping[str, Any] | None = None, concurrency: int = 16) -> None:
        self._vf = import_optional_library("verifiers.v1", extra="verifiers", wanted_by="verifiers")
        asked = dict(config or {})
        asked["taskset"] = {**asked.get("taskset", {}), "id": taskset}
        try:
            self._world = self._vf.load_environment(self._vf.resolve_env_config(asked))
        except Exception as error:
            problem = f"verifiers cannot make it: {type(error).__name__}: {error}"
            raise ConfigError(problem, key="taskset", value=taskset) from error
        self.concurrency = concurrency
        self._calls = ModelCallEndpoint()
        self._serving: asyncio.Task[None] | None = None
        self._rollout: asyncio.Task[Any] | None = None
        self._stop = asyncio.Event()
        self._tasks: list[Any] = []
        self._url = ""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        await self._end_rollout()
        if self._serving is None:
            await self._serve()
        task = self._task(int(data.get("task", seed)))
        client = self._vf.EvalClientConfig(base_url=self._url, api_key_var="HEADWAY_NEEDS_NO_KEY")
        context = self._vf.ModelContext(model="headway", client=client)
        self._rollout = asyncio.create_task(self._world.run_episode(task, context), name="verifiers episode")
        asked = await self._calls.following(self._rollout)
        if asked is None:
            self._finished()  # says why
            raise EnvironmentFailed("verifiers ended the episode without asking the model")
        self._asked = asked
        return format_new_messages(asked, first=True)

    async def step(self, action: str) -> Reply:
        assert self._rollout is not None
        offered = bool(self._asked.get("tools"))
        valid = not offered or not any(isinstance(call, str) for call in parse_tool_calls(action).calls)
        self._calls.answer(action)
        asked = await self._calls.following(self._rollout)
        if asked is not None:
            self._asked = asked
            return Reply(format_new_messages(asked, first=False), valid=valid)
        reward, info = self._finished()
        return Reply("", reward, done=True, valid=valid, success=reward >= 1.0, info=info)

    async def close(self) -> None:
        await self._end_rollout()
        serving, self._serving = self._serving, None
        if serving is not None:
            self._stop.set()
            await asyncio.wait({serving})
        await self._calls.close()

    def _finished(self) -> tuple[float, dict[str, Any]]:
        """Reward and metrics of the episode that has ended. Raises `EnvironmentFailed`."""
        assert self._rollout is not None
        rollout, self._rollout = self._rollout, None
        if rollout.cancelled() or rollout.exception() is not None:
            raise EnvironmentFailed(f"verifiers failed: {rollout.exception()!r}")
        episode = rollout.result()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EnvironmentFailed(
                f"verifiers lost the episode: {'; '.join(f'{e.type}: {e.message}' for e in errors)}"
            )
        played = [trace for trace in episode.traces if trace.agent.trainable]
        metrics = {name: value for trace in played for name, value in trace.metrics.items()}
        return float(sum(trace.reward for trace in played)), {"metrics": metrics}

    def _task(self, number: int) -> Any:
        if not self._tasks:
            self._tasks = list(islice(self._world.taskset, _MAX_TASKS))
        if not self._tasks:
            raise EnvironmentFailed("the taskset is empty")
        return self._tasks[number % len(self._tasks)]

    async def _serve(self) -> None:
        """Have the endpoint and the library's own servers, which must be left by the task that entered them."""
        self._url = await self._calls.start()
        self._stop = asyncio.Event()
        ready = asyncio.Event()

        async def serve() -> None:
            async with self._world.serving():
                ready.set()
                await self._stop.wait()

        self._serving = asyncio.create_task(serve(), name="verifiers")
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            raise EnvironmentFailed(f"verifiers does not serve: {self._serving.exception()!r}")

    async def _end_rollout(self) -> None:
        rollout, self._rollout = self._rollout, None
        self._calls.forget()
        if rollout is not None:
            rollout.cancel()
            await asyncio.wait({rollout})
