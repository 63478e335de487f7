"""Environments of the `verifiers` library (0.4 and later), played turn by turn.

The library plays an episode itself and asks a model over HTTP; here the caller of `step` is that model. The library
gets a small OpenAI-compatible endpoint on the loopback interface, below a path that cannot be guessed. A request waits
there until the policy has acted; requests are answered in order of arrival. Token ids and log-probabilities do not pass
through it: the policy's text is passed on as text, and tool calls written in it as tool calls.

Every request is a turn. The reward that the library gives the finished episode is the reward of the last turn. The seed
chooses a task. If an agent rewrites its history, the policy reads only what is new. An episode that the library reports
as failed is lost.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from headway.environments.chat_turns import describe_signatures
from headway.environments.response_parsing import ParsedToolCall, parse_tool_calls
from headway.environments.text_environment import Reply
from headway.errors import ConfigError, EnvironmentFailed
from headway.extras import import_optional

_MAX_TASKS = 100_000
"""Number of tasks that are used of a taskset without end."""


class VerifiersEnvironment:
    """`taskset`: id of an installed taskset; `config`: the rest of the library's `[env]`, such as `agent`."""

    reusable = True

    def __init__(self, *, taskset: str, config: Mapping[str, Any] | None = None, concurrency: int = 16) -> None:
        self._verifiers = import_optional("verifiers.v1", extra="verifiers", key="env_type", value="verifiers")
        settings = dict(config or {})
        settings["taskset"] = {**settings.get("taskset", {}), "id": taskset}
        try:
            self._world = self._verifiers.load_environment(self._verifiers.resolve_env_config(settings))
        except Exception as error:
            problem = f"verifiers cannot make it: {type(error).__name__}: {error}"
            raise ConfigError(problem, key="taskset", value=taskset) from error
        self.concurrency = concurrency
        self._endpoint = ModelCallEndpoint()
        self._serving: asyncio.Task[None] | None = None
        self._rollout: asyncio.Task[Any] | None = None
        self._stop = asyncio.Event()
        self._tasks: list[Any] = []
        self._url = ""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        await self._cancel_rollout()
        if self._serving is None:
            await self._start_serving()
        task = self._find_task(int(data.get("task", seed)))
        client = self._verifiers.EvalClientConfig(base_url=self._url, api_key_var="HEADWAY_NEEDS_NO_KEY")
        context = self._verifiers.ModelContext(model="headway", client=client)
        self._rollout = asyncio.create_task(self._world.run_episode(task, context), name="verifiers episode")
        request = await self._endpoint.next_request(self._rollout)
        if request is None:
            self._finish_rollout()  # raises the reason, if the library gives one
            raise EnvironmentFailed("verifiers ended the episode without asking the model")
        self._request = request
        return format_new_messages(request, first=True)

    async def step(self, action: str) -> Reply:
        assert self._rollout is not None
        has_tools = bool(self._request.get("tools"))
        valid = not has_tools or not any(isinstance(call, str) for call in parse_tool_calls(action).calls)
        self._endpoint.answer(action)
        request = await self._endpoint.next_request(self._rollout)
        if request is not None:
            self._request = request
            return Reply(format_new_messages(request, first=False), valid=valid)
        reward, info = self._finish_rollout()
        return Reply("", reward, done=True, valid=valid, success=reward >= 1.0, info=info)

    async def close(self) -> None:
        await self._cancel_rollout()
        serving, self._serving = self._serving, None
        if serving is not None:
            self._stop.set()
            await asyncio.wait({serving})
        await self._endpoint.close()

    def _finish_rollout(self) -> tuple[float, dict[str, Any]]:
        """Return the reward and metrics of the ended episode. Raises `EnvironmentFailed`."""
        assert self._rollout is not None
        rollout, self._rollout = self._rollout, None
        if rollout.cancelled() or rollout.exception() is not None:
            raise EnvironmentFailed(f"verifiers failed: {rollout.exception()!r}")
        episode = rollout.result()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise EnvironmentFailed(f"verifiers lost the episode: {reasons}")
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        metrics = {name: value for trace in traces for name, value in trace.metrics.items()}
        return float(sum(trace.reward for trace in traces)), {"metrics": metrics}

    def _find_task(self, number: int) -> Any:
        if not self._tasks:
            self._tasks = list(islice(self._world.taskset, _MAX_TASKS))
        if not self._tasks:
            raise EnvironmentFailed("the taskset is empty")
        return self._tasks[number % len(self._tasks)]

    async def _start_serving(self) -> None:
        """Start the endpoint and the library's servers; the task that enters those must also leave them."""
        self._url = await self._endpoint.start()
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

    async def _cancel_rollout(self) -> None:
        rollout, self._rollout = self._rollout, None
        self._endpoint.cancel_requests()
        if rollout is not None:
            rollout.cancel()
            await asyncio.wait({rollout})


class ModelCallEndpoint:
    """The HTTP endpoint and the requests that wait there."""

    def __init__(self) -> None:
        self._web = import_optional("aiohttp.web", extra="serve", key="env_type", value="verifiers")
        self._path = f"/{secrets.token_urlsafe(16)}/v1"
        self._requests: asyncio.Queue[tuple[Mapping[str, Any], asyncio.Future[str]]] = asyncio.Queue()
        self._answer: asyncio.Future[str] | None = None
        """The answer to the request that was taken last."""
        self._runner: Any = None

    async def start(self) -> str:
        """Listen and return the base URL."""
        application = self._web.Application(client_max_size=16 << 20)
        application.router.add_post(f"{self._path}/chat/completions", self._handle)
        self._runner = self._web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await self._web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}{self._path}"

    async def close(self) -> None:
        self.cancel_requests()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def next_request(self, rollout: asyncio.Task[Any]) -> Mapping[str, Any] | None:
        """Return the next request, or `None` if the rollout ended first."""
        arriving = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({arriving, rollout}, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                return None
            body, self._answer = arriving.result()
            return body
        finally:
            arriving.cancel()

    def answer(self, text: str) -> None:
        """Answer the request that was taken last with the policy's text."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(text)
        self._answer = None

    def cancel_requests(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
        self._answer = None
        while not self._requests.empty():
            self._requests.get_nowait()[1].cancel()

    async def _handle(self, request: Any) -> Any:
        try:
            body = await request.json()
            messages = body["messages"]
            assert isinstance(messages, list) and messages
        except (ValueError, KeyError, TypeError, AssertionError):
            return self._web.json_response({"error": {"message": "no chat request"}}, status=400)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((body, answer))
        completion = make_completion_body(body, await answer)
        if not body.get("stream"):
            return self._web.json_response(completion)
        chunk = {**completion, "object": "chat.completion.chunk"}
        chunk["choices"] = [{**one, "delta": one.pop("message")} for one in completion["choices"]]
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return self._web.Response(text=text, content_type="text/event-stream")


def make_completion_body(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the policy's text in OpenAI's form. It has tool calls if tools were offered and all calls are valid."""
    parsed = parse_tool_calls(text) if body.get("tools") else None
    calls = [call for call in parsed.calls if isinstance(call, ParsedToolCall)] if parsed else []
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if parsed and calls and len(calls) == len(parsed.calls):
        message["content"] = parsed.text or None
        message["tool_calls"] = [_make_tool_call_body(number, call) for number, call in enumerate(calls)]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", "headway"),
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def format_new_messages(body: Mapping[str, Any], *, first: bool) -> str:
    """Return the text of a request that the policy has not read: everything, or what follows its last answer."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    if not first:
        last = max((index for index, one in enumerate(messages) if one.get("role") == "assistant"), default=-1)
        messages = messages[last + 1 :]
    parts = []
    if first and body.get("tools"):
        parts.append(describe_signatures(body["tools"]))
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
