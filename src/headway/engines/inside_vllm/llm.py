"""`AsyncLLM` as the core of an engine. The only module that imports vLLM (0.32); made in the loop that it is used in.

Everything that a checkpoint's `generation_config` could change is said in each request, and its own end of text is
ignored: what ends an answer is in `stop_token_ids`. No `seed` is sent: with one, vLLM on a CPU has been seen to die.
Log-probabilities are those of what was drawn from (`processed_logprobs`), after temperature, top-k, top-p and min-p.

`add_request` is used where vLLM's own `generate` would be shorter, because it says when a request has begun: from then
on a pause that aborts ends it. The answer to a pause comes behind all that was made before it, and what waits for that
has run when `pause_generation` returns.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

from headway.engines.inside_vllm.core import Asked, CoreLost, Piece, Pieces
from headway.engines.servers.launch import Launch, vllm_options
from headway.errors import ConfigError, EngineError
from headway.types import FinishReason
from headway.weights.base import Manifest

_KEY = "actor_infer.strategy_args.strategy_config.server_args"
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_END_S = 2.0


class Llm:
    """A `Core`. `worker` names the class that is mixed into vLLM's workers: it has `headway_take`.

    `said`: what vLLM has last written, for those who ask how it ended.
    """

    def __init__(self, launch: Launch, worker: str, said: Callable[[], str] = lambda: "") -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = {field.name for field in fields(AsyncEngineArgs)}
        arguments = {**engine_arguments(launch, known), "worker_extension_cls": worker}
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

    async def add(self, asked: Asked) -> Pieces:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        async with self._talking():
            try:
                params = SamplingParams(**sampling(asked), output_kind=RequestOutputKind.DELTA)
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
                raise CoreLost("vLLM kept its prefix cache: something still runs")
            await self._llm.update_weight_version(label)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._llm.shutdown, _END_S)

    async def _pieces(self, found: Any) -> Pieces:
        """`found` is where vLLM puts what is new, until somebody fetches it."""
        over = False
        try:
            while not over:
                async with self._talking():
                    news = found.get_nowait() or await found.get()
                over = news.finished
                yield piece_of(news.outputs[0])
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
            raise CoreLost(f"vLLM: {type(error).__name__}: {error}") from error

    def _ended(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        if not self._closed:
            self.on_end(f"vLLM's {process.name} has ended{self._said()}")


def engine_arguments(launch: Launch, known: set[str]) -> dict[str, Any]:
    """Of `AsyncEngineArgs`. Raises `ConfigError` for options that it does not know, or that a run needs as they are."""
    ours, further = vllm_options(launch), launch.further()
    for name, value in further.items():
        if name not in known:
            raise ConfigError("vLLM's engine has no such option", key=f"{_KEY}.{name}", value=value)
        if name in ("logprobs_mode", "generation_config", "worker_extension_cls", "model"):
            raise ConfigError("is what a run needs it to be", key=f"{_KEY}.{name}", value=value, hint="leave it out")
    return {name: value for name, value in {**ours, **further}.items() if value is not None}


def sampling(asked: Asked) -> Mapping[str, Any]:
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


def piece_of(output: Any) -> Piece:
    """From vLLM's `CompletionOutput`, which holds what is new. Raises `CoreLost` for what nobody can use."""
    tokens, logprobs = list(output.token_ids), output.logprobs or ()
    if len(logprobs) < len(tokens):
        raise CoreLost(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
    if output.finish_reason is not None and output.finish_reason not in _FINISH:
        raise CoreLost(f"a request ended by {output.finish_reason!r}")
    return Piece(
        tokens=tokens,
        logps=[float(found[token].logprob) for token, found in zip(tokens, logprobs, strict=False)],
        finish=None if output.finish_reason is None else _FINISH[output.finish_reason],
        labels=[span.version for span in output.weight_versions or ()],
    )
