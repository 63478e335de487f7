"""Small models, versions of their weights, and engines that serve them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headway.engines.base import Engine, Progress, Request
from headway.engines.native.model_cache_runner import ModelCacheRunner
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.native_scheduler import StepPlan
from headway.engines.native.served_parameters import ServedParameters
from headway.engines.native.settings import NativeSettings
from headway.engines.native.step_runner import StepRunner
from headway.errors import TransferError
from headway.types import FinishReason, SamplingParams
from headway.weights.base import Bucket, Manifest, TensorEntry, WeightReceiver, compute_checksum

VOCABULARY = 97
FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, all heads": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama, heads of 96": (LlamaConfig, LlamaForCausalLM, {"head_dim": 96}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 64}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 64, "sliding_window": None}),
    "mistral, window of 9": (MistralConfig, MistralForCausalLM, {"head_dim": 96, "sliding_window": 9}),
}


def make_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Random and sharp enough that sampling has something to prefer."""
    config_type, model_type, options = FAMILIES[family]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel = model_type(config_type(**(shape | options | changes)))
    return model.eval()


def counting_model(size: int = 128, **changes: Any) -> PreTrainedModel:
    """Says n + 1 after n, whatever came before: every length is known beforehand."""
    model = make_model(**({"hidden_size": size, "vocab_size": size, "num_hidden_layers": 1} | changes))
    words = model.config.vocab_size
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(words))
        model.get_output_embeddings().weight.copy_(50 * torch.eye(words).roll(1, dims=0))
    return model


def version_of(
    model: PreTrainedModel, version: int, *, bucket_bytes: int = 40_000, dtype: torch.dtype = torch.float32
) -> tuple[Manifest, list[Bucket]]:
    """A model's weights as they travel."""
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in model.state_dict())]
    tensors = {name: tensor.detach().to(dtype) for name, tensor in named}
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    parts = [part.numpy().tobytes() for part in flat.split(bucket_bytes)]
    manifest = Manifest(
        version=version,
        tensors=tuple(
            TensorEntry(name=name, shape=tuple(tensor.shape), dtype=str(dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        ),
        checksums=tuple(compute_checksum(part) for part in parts),
        total_bytes=len(flat),
    )
    sums = manifest.checksums
    return manifest, [
        Bucket(version=version, index=index, checksum=sums[index], payload=part) for index, part in enumerate(parts)
    ]


async def serve(engine: Engine, model: PreTrainedModel, version: int = 0, **options: Any) -> None:
    """Load and flip."""
    manifest, buckets = version_of(model, version, **options)
    await engine.receiver.begin(manifest)
    for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()


class ModelSource:
    """Holds some versions."""

    def __init__(self, models: dict[int, PreTrainedModel]) -> None:
        self._models = models

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        if version not in self._models:
            raise TransferError(f"version {version} is not held")
        manifest, buckets = version_of(self._models[version], version)
        return manifest, _each(buckets)


async def _each(buckets: list[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket


class HandOver:
    """A transport inside one process."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        return bucket

    def close(self) -> None: ...


class SlowSteps:
    """Takes its time for each step, counts them, and breaks when told to."""

    def __init__(self, model: PreTrainedModel, parameters: ServedParameters, settings: NativeSettings) -> None:
        super().__init__(model, parameters, settings)  # type: ignore[call-arg]
        self.steps = 0
        self.step_s = 0.01
        self.broken = False
        self.midway = threading.Event()
        """Set after a dozen steps."""

    def step(self, plan: StepPlan) -> tuple[list[int], list[float]]:
        time.sleep(self.step_s)
        if self.broken:
            raise RuntimeError("the model broke")
        self.steps += 1
        if self.steps == 12:
            self.midway.set()
        drawn: tuple[list[int], list[float]] = super().step(plan)  # type: ignore[misc]
        return drawn


class SlowRunner(SlowSteps, StepRunner):
    """Shares each step among sequences."""


class SlowCacheRunner(SlowSteps, ModelCacheRunner):
    """Computes one sequence after the other."""


def run(scenario: Coroutine[Any, Any, None], timeout_s: float = 300.0) -> None:
    """On a loop of its own, never forever."""

    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await scenario

    asyncio.run(bounded())


def make_engine(model: PreTrainedModel, *, name: str = "engine/0", **options: Any) -> NativeEngine:
    """An engine of `model`'s architecture; keywords that settings know go there."""
    fields = NativeSettings.__dataclass_fields__
    chosen = {"slots": 4, "slot_tokens": 128, "prefill_tokens": 16, "stream_tokens": 4}
    chosen |= {key: options.pop(key) for key in list(options) if key in fields}
    config_type = type(model)
    return NativeEngine(name, lambda: config_type(model.config), NativeSettings(**chosen), **options)


def request(
    name: str = "a",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    group: int = -1,
    count: int = 20,
    session: str = "",
    continues: bool = False,
    **params: Any,
) -> Request:
    return Request(
        request_id=name,
        session=session or name,
        prompt=list(prompt),
        params=SamplingParams(max_new_tokens=count, **params),
        prefix_key=group,
        continues=continues,
    )


async def together(engine: Engine, requests: Sequence[Request]) -> list[Progress]:
    """All at once, to their ends."""
    parts = [Progress() for _ in requests]
    ends = await asyncio.gather(*(engine.generate(each, part) for each, part in zip(requests, parts, strict=True)))
    assert all(end in (FinishReason.STOP, FinishReason.LENGTH) for end in ends)
    return parts


@torch.no_grad()
def full_logps(model: PreTrainedModel, prompt: Sequence[int], actions: Sequence[int], temperature: float = 1.0) -> Any:
    """Log-probabilities of the whole vocabulary before each action, by one full forward: (actions, vocabulary)."""
    logits = model(torch.tensor([[*prompt, *actions]])).logits[0].float() / temperature
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def worst(model: PreTrainedModel, asked: Request, progress: Progress) -> float:
    """Largest difference between what was reported and a full forward."""
    temperature = asked.params.temperature or 1.0
    logps = full_logps(model, asked.prompt, progress.actions, temperature)
    exact = logps.gather(1, torch.tensor(progress.actions)[:, None])[:, 0]
    return float((exact - torch.tensor(progress.logps)).abs().max())


async def flip_midway(
    engine: NativeEngine, runners: list[Any], old: PreTrainedModel, new: PreTrainedModel
) -> tuple[Request, Progress]:
    """A request that version 4 begins and version 5 ends; `runners` has the slow runner that says when it is midway."""
    await serve(engine, old, 4)
    asked, progress = request("a", [5, 6, 7], count=30), Progress()
    task = asyncio.create_task(engine.generate(asked, progress))
    await asyncio.to_thread(runners[0].midway.wait, 10.0)
    await serve(engine, new, 5)
    await task
    return asked, progress
