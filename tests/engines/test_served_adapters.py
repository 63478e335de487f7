"""Adapters as versions: the engine computes base + adapter, and the base exists once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from headway.engines.base import Progress
from headway.engines.native.native_core import make_block_core
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import AdapterSettings
from headway.errors import TransferError
from headway.models.frozen_base import FrozenBase, group_for_fusing, join_neighbours
from headway.trainers.local.lora import attach_adapters, list_adapter_tensors
from headway.trainers.local.settings import LoraSettings
from headway.types import VersionRun
from headway.weights.base import WeightReceiver
from headway.weights.weight_store import WeightStore

from .factory import SlowRunner, make_engine, make_model, request, run, serve, together, worst
from .test_native_numbers import _with_kept_kv

pytest.importorskip("peft")
RANK, ALPHA = 4, 6.0


def adapt(model: Any, seed: int = 0, targets: tuple[str, ...] = ()) -> Any:
    """The model with adapters that change it a good deal."""
    attach_adapters(model, LoraSettings(rank=RANK, alpha=ALPHA, targets=targets))
    dice = torch.Generator().manual_seed(seed)
    for name, one in model.named_parameters():
        if ".lora_" in name:
            one.data.copy_(torch.randn(one.shape, generator=dice) / 5)
    return model


async def serve_adapters(receiver: WeightReceiver, model: Any, version: int) -> int:
    """Send the adapters as a trainer does; returns the bytes."""
    store = WeightStore(bucket_mb=0.002, wire_dtype=torch.float32)
    store.publish(version, list_adapter_tensors(model))
    manifest, buckets = await store.gather(version)
    await receiver.begin(manifest)
    async for bucket in buckets:
        await receiver.load(bucket)
    await receiver.flip()
    return manifest.total_bytes


def settings_of(base: FrozenBase | Any, targets: tuple[str, ...] = ()) -> AdapterSettings:
    return AdapterSettings(rank=RANK, scale=ALPHA / RANK, targets=targets, load_base=base.read)


def engine_of(model: Any, targets: tuple[str, ...] = (), *, blocks: bool = False, **options: Any) -> NativeEngine:
    base = FrozenBase("cpu", torch.float32)
    base.adopt(model)
    options |= {"make_core": make_block_core} if blocks else {}
    return make_engine(model, adapters=settings_of(base, targets), **options)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("family", "targets"), [("qwen2", ()), ("qwen3", ("q_proj", "v_proj", "down_proj")), ("llama", ("up_proj",))]
)
def test_log_probabilities_are_those_of_the_model_with_adapters(
    family: str, targets: tuple[str, ...], blocks: bool
) -> None:
    async def scenario() -> None:
        model = make_model(family)
        engine = engine_of(model, targets, blocks=blocks)
        adapt(model, targets=targets)
        for version in range(2):
            adapted = [one for name, one in model.named_parameters() if "lora_B" in name]
            for one in adapted:
                one.data.mul_(-1.0)
            sent = await serve_adapters(engine.receiver, model, version)
            assert sent == 4 * sum(one.numel() for name, one in model.named_parameters() if ".lora_" in name)
            asked = [request(f"{number}", range(3, 9 + number), count=12) for number in range(3)]
            for each, progress in zip(asked, await together(engine, asked), strict=True):
                assert worst(model, each, progress) < 1e-4
                assert progress.runs == (VersionRun(version=version, count=12),)
        await engine.close()

    run(scenario())


def test_the_base_is_served_from_the_memory_of_the_trainer() -> None:
    async def scenario() -> None:
        model, parts = make_model("qwen2"), []
        base = FrozenBase("cpu", torch.float32)
        base.adopt(model)

        def make_core(*args: Any) -> Any:
            parts.append(make_block_core(*args))
            return parts[-1]

        engine = make_engine(model, adapters=settings_of(base), make_core=make_core)
        adapt(model)
        await serve_adapters(engine.receiver, model, 0)
        trained = {name.replace(".base_layer", ""): one for name, one in model.named_parameters()}
        served = parts[0][0].base
        assert served._installed is not None
        for unit, tensors in served._installed.items():
            assert tensors[0].data_ptr() == trained[unit].data_ptr(), f"{unit} is a copy"
        before = {name: one.clone() for name, one in trained.items() if ".lora_" not in name}
        await serve_adapters(engine.receiver, model, 1)
        assert all(torch.equal(trained[name], one) for name, one in before.items())
        again = base.adopt(make_model("qwen2", seed=5))  # a trainer that starts again gets the same memory
        assert all(one.data_ptr() == trained[name].data_ptr() for name, one in again.named_parameters())
        await engine.close()

    run(scenario())


def test_a_flip_in_the_middle_is_exact_at_the_token() -> None:
    async def scenario() -> None:
        old = make_model("qwen3")
        runners: list[SlowRunner] = []

        def runner(*parts: Any) -> SlowRunner:
            runners.append(SlowRunner(*parts))
            return runners[0]

        engine = engine_of(old, make_runner=runner)
        new = adapt(make_model("qwen3"), seed=2)
        adapt(old, seed=1)
        await serve_adapters(engine.receiver, old, 4)
        asked, progress = request("a", [5, 6, 7], count=30), Progress()
        task = asyncio.create_task(engine.generate(asked, progress))
        await asyncio.to_thread(runners[0].midway.wait, 20.0)
        await serve_adapters(engine.receiver, new, 5)
        await task
        assert [each.version for each in progress.runs] == [4, 5]
        exact = _with_kept_kv(old, new, asked.prompt, progress.actions, progress.runs[0].count)
        assert float((exact - torch.tensor(progress.logps)).abs().max()) < 1e-4
        await engine.close()

    run(scenario())


def test_whole_models_and_other_adapters_are_refused() -> None:
    async def scenario() -> None:
        model = make_model("qwen2")
        engine = engine_of(model)
        with pytest.raises(TransferError, match="has no tensor"):
            await serve(engine, make_model("qwen2"))
        with pytest.raises(TransferError, match="lacks"):
            await serve_adapters(engine.receiver, adapt(make_model("qwen2"), targets=("q_proj",)), 0)
        await serve_adapters(engine.receiver, adapt(model), 1)
        assert engine.receiver.version == 1
        await engine.close()

    run(scenario())


def test_an_engine_that_starts_again_has_its_base_back() -> None:
    async def scenario() -> None:
        model = make_model("llama")
        engine = engine_of(model)
        adapt(model)
        await serve_adapters(engine.receiver, model, 3)
        await engine.restart()
        assert engine.receiver.version == -1
        await serve_adapters(engine.receiver, model, 3)
        asked = request("a", range(3, 20), count=8)
        (progress,) = await together(engine, [asked])
        assert worst(model, asked, progress) < 1e-4
        await engine.close()

    run(scenario())


def test_neighbours_are_joined_and_others_are_not() -> None:
    flat = torch.arange(24.0)
    left, right = flat[:8].view(2, 4), flat[8:24].view(4, 4)
    joined = join_neighbours([left, right])
    assert joined is not None and joined.data_ptr() == flat.data_ptr() and torch.equal(joined, flat.view(6, 4))
    assert join_neighbours([right, left]) is None and join_neighbours([left, right.clone()]) is None
    names = [
        "m.q_proj.weight",
        "m.q_proj.bias",
        "m.k_proj.weight",
        "m.k_proj.bias",
        "m.v_proj.weight",
        "m.o_proj.weight",
    ]
    assert group_for_fusing(names)[0] == ["m.q_proj.weight", "m.k_proj.weight", "m.v_proj.weight"]
    assert sorted(name for group in group_for_fusing(names) for name in group) == sorted(names)
