"""vLLM's `AsyncLLM` (vLLM 0.26 to 0.32) with the few calls that an engine needs. The only module that imports vLLM.

It is made in the event loop that it is used in. Requests are sampled as `VllmDialect` says, log-probabilities are those
of what was drawn from. `add_request` is used where vLLM's own `generate` would be shorter, because it says when a
request has begun: from then on a pause that aborts ends it. The answer to a pause comes behind all that was made before
it, and what waits for that has run when `pause_generation` returns. Every call has a deadline, and its error names the
phase of an update that did not end.
"""

import asyncio
import multiprocessing
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import fields
from typing import Any

from headway.config.server_versions import check_server_version
from headway.engines.servers.server_process import LaunchSettings, make_vllm_options
from headway.engines.streaming_engine import FINISH_REASONS, BackendLost, StreamChunk, StreamRequest
from headway.errors import ConfigError, EngineError
from headway.weights.base import Manifest
from headway.weights.shared_version import VersionBuffer

_OPTIONS_KEY = "actor_infer.strategy_args.strategy_config.server_args"
_FIXED_OPTIONS = ("logprobs_mode", "generation_config", "worker_extension_cls", "model")
_SHUTDOWN_S = 2.0
_DISCARD = 2
"""Level of sleep at which weights are not kept: the next version brings all of them."""

ChunkStream = AsyncGenerator[StreamChunk, None]
"""Ends with the chunk that has a `finish`. Left before that, the request is aborted. Raises `BackendLost`."""


class AsyncLlmCore:
    """One vLLM. Every call raises `BackendLost` where it is gone.

    `worker_extension` names the class that is mixed into vLLM's workers: it has `headway_take` and `headway_label`.
    `read_output` returns what vLLM has last written, to say how it ended. A call that vLLM answers at once may take
    `call_s`, one that moves weights `load_s`.
    """

    def __init__(
        self,
        launch: LaunchSettings,
        worker_extension: str,
        read_output: Callable[[], str] = lambda: "",
        *,
        call_s: float = 30.0,
        load_s: float = 600.0,
    ) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        import vllm

        check_server_version("vllm", vllm.__version__)
        self._call_s, self._load_s = call_s, load_s
        known = {field.name for field in fields(AsyncEngineArgs)}
        arguments = {**make_engine_arguments(launch, known), "worker_extension_cls": worker_extension}
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._on_end: Callable[[str], object] = lambda how: None
        self._read_output = read_output
        self._closed = False
        loop = asyncio.get_running_loop()
        for process in multiprocessing.active_children():
            loop.add_reader(process.sentinel, self._on_process_end, process)

    def report_end_to(self, on_end: Callable[[str], object]) -> None:
        """Call `on_end` with how vLLM ended, when it does so by itself. Replaces the callback before."""
        self._on_end = on_end

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, by the model's tokenizer."""
        return str(self._llm.get_tokenizer().decode(tokens))

    async def add(self, request: StreamRequest) -> ChunkStream:
        """Begin a request; once this has returned, `end_requests` ends it too. Raises `EngineError` for a bad one."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        try:
            params = SamplingParams(**make_sampling_arguments(request), output_kind=RequestOutputKind.DELTA)
            outputs = await self._llm.add_request(request.key, tokens_input(list(request.prompt)), params)
        except asyncio.CancelledError:
            await self._llm.abort(request.key)  # it may have got through
            raise
        except Exception as error:
            if isinstance(error, ValueError | _find_client_error()):
                raise EngineError(f"vLLM refuses it: {error}") from error
            raise _make_loss(error) from error
        return self._read_chunks(outputs)

    async def abort(self, key: str) -> None:
        """End one request: its stream ends with `ABORTED`. Unknown ones are ignored."""
        await self._call(self._llm.abort(key), "abort", self._call_s)

    async def end_requests(self) -> None:
        """End all requests, each with the tokens that it has, and begin none before `release`."""
        await self._call(self._llm.pause_generation(mode="abort", clear_cache=True), "pause", self._call_s)

    async def hold(self) -> None:
        """Stop between two tokens and keep everything for `release`, also what is added now."""
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False), "pause", self._call_s)

    async def release(self) -> None:
        """Work again."""
        await self._call(self._llm.resume_generation(), "resume", self._call_s)

    async def load(self, manifest: Manifest, buffer: VersionBuffer, label: str) -> None:
        """Compute with these weights from now on, with nothing cached from others. Nothing runs meanwhile."""
        tensors = [[entry.name, list(entry.shape), entry.dtype] for entry in manifest.tensors]
        words = [["bytes", word.hex()] if isinstance(word, bytes) else ["plain", word] for word in buffer.handle]
        order = (words, buffer.start, tensors, label)
        await self._call(self._llm.collective_rpc("headway_take", args=order), "update", self._load_s)
        if not await self._call(self._llm.reset_prefix_cache(), "cache", self._call_s):
            raise BackendLost("vLLM kept its prefix cache: something still runs")
        if hasattr(self._llm, "update_weight_version"):  # from 0.28 on
            await self._call(self._llm.update_weight_version(label), "label", self._call_s)
        found = set(await self._call(self._llm.collective_rpc("headway_label"), "label", self._call_s))
        if found != {label}:
            raise BackendLost(f"vLLM's workers have weights {found} and not {label!r}")

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache. Nothing runs."""
        await self._call(self._llm.sleep(level=_DISCARD), "sleep", self._load_s)

    async def wake(self) -> None:
        """Take the memory again; weights are loaded afterwards."""
        await self._call(self._llm.wake_up(), "waking up", self._load_s)

    async def close(self) -> None:
        """End it. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_S)

    async def _read_chunks(self, outputs: Any) -> ChunkStream:
        """Yield what vLLM puts into its queue `outputs`."""
        over = False
        try:
            while not over:
                try:
                    output = outputs.get_nowait() or await outputs.get()
                except Exception as error:
                    raise _make_loss(error) from error
                over = output.finished
                yield output_to_chunk(output.outputs[0])
        finally:
            if not over and not self._closed:
                await self._llm.abort(outputs.request_id, internal=True)

    async def _call(self, call: Awaitable[Any], phase: str, limit_s: float) -> Any:
        """Await a call. Raises `BackendLost` for errors of vLLM, which mean that it is gone, and after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError:
            raise BackendLost(f"{phase}: vLLM has not answered in {limit_s:g} s", silent=True) from None
        except Exception as error:
            raise BackendLost(f"{phase}: {_make_loss(error)}") from error

    def _on_process_end(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        if not self._closed:
            self._on_end(f"vLLM's {process.name} has ended{self._read_output()}")


def _find_client_error() -> type[Exception]:
    """Return the error of a request that vLLM refuses; before 0.28 it is always a `ValueError`."""
    import vllm.exceptions

    found: type[Exception] = getattr(vllm.exceptions, "VLLMClientError", ValueError)
    return found


def _make_loss(error: Exception) -> BackendLost:
    return BackendLost(f"vLLM: {type(error).__name__}: {error}")


def make_engine_arguments(launch: LaunchSettings, known: set[str]) -> dict[str, Any]:
    """Return arguments of `AsyncEngineArgs`. Raises `ConfigError` for options that it has not, or that a run fixes."""
    extra = launch.extra_arguments()
    for name, value in extra.items():
        if name not in known:
            raise ConfigError("vLLM's engine has no such option", key=f"{_OPTIONS_KEY}.{name}", value=value)
        if name in _FIXED_OPTIONS:
            raise ConfigError(
                "is what a run needs it to be", key=f"{_OPTIONS_KEY}.{name}", value=value, hint="leave it out"
            )
    options = {**make_vllm_options(launch), **extra}
    return {name: value for name, value in options.items() if value is not None}


def make_sampling_arguments(request: StreamRequest) -> dict[str, Any]:
    """Return arguments of vLLM's `SamplingParams`."""
    return {
        "max_tokens": request.max_tokens,
        **request.sampling_arguments(),
        "ignore_eos": True,
        "detokenize": bool(request.params.stop),
        "logprobs": 0,
    }


def output_to_chunk(output: Any) -> StreamChunk:
    """Convert vLLM's `CompletionOutput`, which holds what is new. Raises `BackendLost` for what cannot be used."""
    tokens, logprobs, reason = list(output.token_ids), output.logprobs or (), output.finish_reason
    if len(logprobs) < len(tokens):
        raise BackendLost(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
    if reason is not None and reason not in FINISH_REASONS:
        raise BackendLost(f"a request ended by {reason!r}")
    return StreamChunk(
        tokens=tokens,
        logps=[float(found[token].logprob) for token, found in zip(tokens, logprobs, strict=False)],
        finish=None if reason is None else FINISH_REASONS[reason],
        labels=[span.version for span in getattr(output, "weight_versions", None) or ()],
    )
