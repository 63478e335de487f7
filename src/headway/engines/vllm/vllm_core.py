"""What an engine needs of a vLLM in its own process."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

from headway.engines.servers.settings import LaunchSettings, make_vllm_options
from headway.errors import ConfigError, EngineError
from headway.types import FinishReason, SamplingParams
from headway.weights.base import Manifest


class CoreLostError(EngineError):
    """There is no vLLM any more behind the one that we talk to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """One request as vLLM gets it."""

    key: str
    """vLLM's name for it."""
    prompt: Sequence[int]
    count: int
    """Most tokens to make."""
    params: SamplingParams
    ends: Sequence[int]
    """Tokens that end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreChunk:
    """What one step adds to a request."""

    tokens: Sequence[int] = ()
    logps: Sequence[float] = ()
    finish: FinishReason | None = None
    labels: Sequence[str] = ()
    """With the last piece: of the weights that made any of its tokens, by vLLM's own books."""


CoreStream = AsyncGenerator[CoreChunk, None]
"""Until the piece that has a `finish`. Left before, the request is aborted. Raises `CoreLostError`."""


class VllmCore(Protocol):
    """One vLLM. Every call raises `CoreLostError` where it is gone."""

    on_end: Callable[[str], None]
    """Called with how it ended, when it did so by itself."""

    async def add(self, asked: CoreRequest) -> CoreStream:
        """Begin a request; when this returns, `stop` ends it too. Raises `EngineError` where it is refused."""
        ...

    async def abort(self, key: str) -> None:
        """End one request: its pieces end with `ABORTED`. Unknown ones are ignored."""
        ...

    async def stop(self) -> None:
        """End all requests, each with the tokens that it has, and begin none before `go_on`."""
        ...

    async def hold(self) -> None:
        """Stop between two tokens and keep everything, also what is added now, for `go_on`."""
        ...

    async def go_on(self) -> None:
        """Work again."""
        ...

    async def load(self, manifest: Manifest, segment: str, label: str) -> None:
        """Compute with these weights from now on, with nothing cached from others. Nothing runs meanwhile."""
        ...

    async def close(self) -> None:
        """End it. Idempotent."""
        ...


_KEY = "actor_infer.strategy_args.strategy_config.server_args"
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_END_S = 2.0


class AsyncLlmCore:
    """A `Core`. `worker` names the class that is mixed into vLLM's workers: it has `headway_take`.

    `said`: what vLLM has last written, for those who ask how it ended.
    """

    def __init__(self, launch: LaunchSettings, worker: str, said: Callable[[], str] = lambda: "") -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = {field.name for field in fields(AsyncEngineArgs)}
        arguments = {**make_engine_arguments(launch, known), "worker_extension_cls": worker}
        self.on_end: Callable[[str], None] = lambda how: None
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._said = said
        self._closed = False
        loop = asyncio.get_running_loop()
        for process in multiprocessing.active_children():
            loop.add_reader(process.sentinel, self._ended, process)

    def decode(self, tokens: list[int]) -> str:
        """As the model's tokenizer does."""
        return str(self._llm.get_tokenizer().decode(tokens))

    async def add(self, asked: CoreRequest) -> CoreStream:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        async with self._talking():
            try:
                params = SamplingParams(**make_sampling_arguments(asked), output_kind=RequestOutputKind.DELTA)
                found = await self._llm.add_request(asked.key, tokens_input(list(asked.prompt)), params)
            except asyncio.CancelledError:
                await self._llm.abort(asked.key)  # it may have got through
                raise
            except (ValueError, VLLMClientError) as error:
                raise EngineError(f"vLLM refuses it: {error}") from error
        return self._pieces(found)

    async def abort(self, key: str) -> None:
        async with self._talking():
            await self._llm.abort(key)

    async def stop(self) -> None:
        async with self._talking():
            await self._llm.pause_generation(mode="abort", clear_cache=True)

    async def hold(self) -> None:
        async with self._talking():
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def go_on(self) -> None:
        async with self._talking():
            await self._llm.resume_generation()

    async def load(self, manifest: Manifest, segment: str, label: str) -> None:
        tensors = [[entry.name, list(entry.shape), entry.dtype] for entry in manifest.tensors]
        async with self._talking():
            await self._llm.collective_rpc("headway_take", args=(segment, tensors))
            if not await self._llm.reset_prefix_cache():
                raise CoreLostError("vLLM kept its prefix cache: something still runs")
            await self._llm.update_weight_version(label)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._llm.shutdown, _END_S)

    async def _pieces(self, found: Any) -> CoreStream:
        """`found` is where vLLM puts what is new, until somebody fetches it."""
        over = False
        try:
            while not over:
                async with self._talking():
                    news = found.get_nowait() or await found.get()
                over = news.finished
                yield output_to_chunk(news.outputs[0])
        finally:
            if not over and not self._closed:
                await self._llm.abort(found.request_id, internal=True)

    @asynccontextmanager
    async def _talking(self) -> AsyncIterator[None]:
        """Errors that are vLLM's own mean that it is gone."""
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            raise CoreLostError(f"vLLM: {type(error).__name__}: {error}") from error

    def _ended(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        if not self._closed:
            self.on_end(f"vLLM's {process.name} has ended{self._said()}")


def make_engine_arguments(launch: LaunchSettings, known: set[str]) -> dict[str, Any]:
    """Of `AsyncEngineArgs`. Raises `ConfigError` for options that it does not know, or that a run needs as they are."""
    ours, further = make_vllm_options(launch), launch.further()
    for name, value in further.items():
        if name not in known:
            raise ConfigError("vLLM's engine has no such option", key=f"{_KEY}.{name}", value=value)
        if name in ("logprobs_mode", "generation_config", "worker_extension_cls", "model"):
            raise ConfigError("is what a run needs it to be", key=f"{_KEY}.{name}", value=value, hint="leave it out")
    return {name: value for name, value in {**ours, **further}.items() if value is not None}


def make_sampling_arguments(asked: CoreRequest) -> Mapping[str, Any]:
    """Of vLLM's `SamplingParams`."""
    params = asked.params
    return {
        "max_tokens": asked.count,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "stop": list(params.stop),
        "stop_token_ids": list(asked.ends),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "detokenize": bool(params.stop),
        "logprobs": 0,
    }


def output_to_chunk(output: Any) -> CoreChunk:
    """From vLLM's `CompletionOutput`, which holds what is new. Raises `CoreLostError` for what nobody can use."""
    tokens, logprobs = list(output.token_ids), output.logprobs or ()
    if len(logprobs) < len(tokens):
        raise CoreLostError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
    if output.finish_reason is not None and output.finish_reason not in _FINISH:
        raise CoreLostError(f"a request ended by {output.finish_reason!r}")
    return CoreChunk(
        tokens=tokens,
        logps=[float(found[token].logprob) for token, found in zip(tokens, logprobs, strict=False)],
        finish=None if output.finish_reason is None else _FINISH[output.finish_reason],
        labels=[span.version for span in output.weight_versions or ()],
    )
