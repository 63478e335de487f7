"""What the native engine does at its edges."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.engines.base import Progress
from headway.engines.native.native_core import make_block_core
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.served_parameters import DeviceParameters
from headway.engines.native.settings import NativeSettings
from headway.errors import ConfigError, EngineCrashed, EngineError, TransferError
from headway.types import FinishReason, VersionRun

from . import factory, families
from .factory import counting_model, make_engine, make_model, request, run, serve, together, version_of, worst


def letters(tokens: list[int]) -> str:
    """A tokenizer of two characters a token."""
    return "".join(f"{token:02x}" for token in tokens)


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    async def scenario() -> None:
        model = counting_model()
        engine = make_engine(model, decode=letters)
        await serve(engine, model)
        progress = Progress()  # 04 05 06 ... 12 13: "213" is in the middle of 0x12 0x13
        assert await engine.generate(request(stop=("zz", "213"), count=60), progress) is FinishReason.STOP
        assert list(progress.actions) == list(range(4, 0x14))
        progress = Progress()
        assert await engine.generate(request(prompt=[0x20, 0x21], stop=("2021",)), progress) is FinishReason.LENGTH
        await engine.close()

    run(scenario())


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    async def scenario() -> None:
        model = counting_model()
        engine = make_engine(model)
        await serve(engine, model)
        with pytest.raises(EngineError, match="tokenizer"):
            await engine.generate(request(stop=("x",)), Progress())
        await engine.close()

    run(scenario())


def test_a_prompt_that_cannot_be_served_is_refused_with_its_numbers_and_hurts_nobody() -> None:
    async def scenario() -> None:
        model = counting_model()
        engine = make_engine(model, slot_tokens=16)
        await serve(engine, model)
        with pytest.raises(EngineError, match=r"16 tokens .* context of 16"):
            await engine.generate(request(prompt=range(16)), Progress())
        with pytest.raises(EngineError, match="empty"):
            await engine.generate(request(prompt=[]), Progress())
        for unknown in (128, -1):
            with pytest.raises(EngineError, match=rf"token {unknown}, and the model knows 0 to 127"):
                await engine.generate(request(prompt=[1, unknown, 2]), Progress())
        progress = Progress()
        assert await engine.generate(request(prompt=range(10), count=99), progress) is FinishReason.LENGTH
        assert list(progress.actions) == [10, 11, 12, 13, 14, 15], "a full slot is an end by length"
        await engine.close()

    run(scenario())


def test_a_request_that_is_complete_already_ends_at_once() -> None:
    async def scenario() -> None:
        model = counting_model()
        engine = make_engine(model, eos=[6])
        await serve(engine, model)
        progress = Progress()
        progress.extend([4, 5], [0.0, 0.0], 0)
        assert await engine.generate(request(count=2), progress) is FinishReason.LENGTH
        assert await engine.generate(request(count=9), progress) is FinishReason.STOP
        assert await engine.generate(request(count=9), progress) is FinishReason.STOP
        assert list(progress.actions) == [4, 5, 6]
        await engine.close()

    run(scenario())


def test_actions_stream_in_chunks_of_a_few() -> None:
    async def scenario() -> None:
        model = counting_model()
        engine = make_engine(model, stream_tokens=4)
        await serve(engine, model)
        chunks: list[int] = []
        await engine.generate(request(count=10), Progress(lambda actions: chunks.append(len(actions))))
        assert chunks == [4, 4, 2]
        await engine.close()

    run(scenario())


def test_one_id_cannot_run_twice_at_once() -> None:
    async def scenario() -> None:
        model = counting_model()
        engine = make_engine(model)
        await serve(engine, model)
        await engine.pause()
        first = asyncio.create_task(engine.generate(request(), Progress()))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already"):
            await engine.generate(request(), Progress())
        await engine.resume()
        assert await first is FinishReason.LENGTH
        await engine.close()

    run(scenario())


def test_an_abort_while_paused_or_waiting_for_a_slot_answers_at_once() -> None:
    async def scenario() -> None:
        model = counting_model()
        engine = make_engine(model, slots=1)
        await serve(engine, model)
        await engine.pause()
        tasks = [asyncio.create_task(engine.generate(request(name), Progress())) for name in "ab"]
        await asyncio.sleep(0)
        await engine.abort("b")
        assert await tasks[1] is FinishReason.ABORTED
        await engine.resume()
        assert await tasks[0] is FinishReason.LENGTH
        await engine.close()

    run(scenario())


def test_closing_ends_what_runs() -> None:
    async def scenario() -> None:
        model = counting_model()
        engine = make_engine(model, make_runner=factory.SlowRunner)
        await serve(engine, model)
        begun = asyncio.Event()
        progress = Progress(on_chunk=lambda actions: begun.set())
        task = asyncio.create_task(engine.generate(request(count=100), progress))
        await begun.wait()
        await engine.close()
        assert await task is FinishReason.ABORTED
        with pytest.raises(EngineCrashed):
            await engine.generate(request(), Progress())
        with pytest.raises(EngineCrashed):
            await engine.receiver.begin(version_of(model, 1)[0])

    run(scenario())


def test_a_model_that_cannot_be_built_says_so() -> None:
    async def scenario() -> None:
        model = make_model(max_position_embeddings=64)
        engine = make_engine(model, slot_tokens=65)
        with pytest.raises(EngineCrashed, match="64 positions"):
            await serve(engine, model)
        with pytest.raises(EngineCrashed, match="does not come up"):
            await engine.restart()
        await engine.close()

    run(scenario())


def test_logits_that_are_not_numbers_are_named() -> None:
    async def scenario() -> None:
        model = make_model()
        engine = make_engine(model)
        with torch.no_grad():
            model.get_output_embeddings().weight[0, 0] = float("nan")
        await serve(engine, model)
        with pytest.raises(EngineCrashed, match="not finite"):
            await engine.generate(request(), Progress())
        await engine.close()

    run(scenario())


@pytest.mark.parametrize("wrong", ["name", "shape", "missing", "bytes", "dtype"])
def test_a_manifest_that_does_not_fit_the_model_is_refused_before_a_byte_is_moved(wrong: str) -> None:
    async def scenario() -> None:
        model = make_model()
        engine = make_engine(model)
        manifest, _ = version_of(model, 1)
        first, *others = manifest.tensors
        changed = {
            "name": replace(manifest, tensors=(replace(first, name="nobody"), *others)),
            "shape": replace(manifest, tensors=(replace(first, shape=(1, 2)), *others)),
            "missing": replace(manifest, tensors=tuple(others)),
            "bytes": replace(manifest, total_bytes=1),
            "dtype": replace(manifest, tensors=(replace(first, dtype="float31"), *others)),
        }
        with pytest.raises(TransferError):
            await engine.receiver.begin(changed[wrong])
        with pytest.raises(TransferError):
            await engine.receiver.flip()
        await engine.close()

    run(scenario())


def test_a_receiver_of_somebody_else_can_hand_over_plain_tensors() -> None:
    class Plain:
        """The least a receiver can be."""

        def __init__(self, switch: Any) -> None:
            self.version = -1
            self.switch = switch

        async def take(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
            await self.switch(version, tensors)
            self.version = version

        def reset(self, *, gone: bool) -> None:
            self.version = -1

    async def scenario() -> None:
        model = make_model("qwen2")
        engine = make_engine(model, make_receiver=Plain)
        tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        receiver: Any = engine.receiver
        with pytest.raises(TransferError, match="missing"):
            await receiver.take(1, dict(list(tensors.items())[1:]))
        await receiver.take(2, tensors)
        asked = request()
        (progress,) = await together(engine, [asked])
        assert worst(model, asked, progress) < 1e-4
        assert progress.runs == (VersionRun(version=2, count=20),)
        await engine.close()

    run(scenario())


@pytest.mark.parametrize("setting", [{"slots": -1}, {"slot_tokens": 1}, {"prefix_tokens": -1}, {"dtype": "float8"}])
def test_settings_that_cannot_be_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NativeSettings(**setting)


def test_an_engine_that_ran_out_of_memory_comes_back_smaller() -> None:
    class Greedy(factory.SlowRunner):
        def step(self, plan: Any) -> tuple[list[int], list[float]]:
            if len(plan.ready) + len(plan.prefills) > 3:
                raise torch.OutOfMemoryError("no room")
            return super().step(plan)

    async def scenario() -> None:
        model = factory.counting_model()
        engine = factory.make_engine(model, slots=6, make_runner=Greedy, eos=[])
        await factory.serve(engine, model)
        asked = [factory.request(str(number), count=8) for number in range(6)]
        parts = [Progress() for _ in asked]
        calls = [engine.generate(each, part) for each, part in zip(asked, parts, strict=True)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, EngineCrashed) and "no room" in str(end) for end in ends) and engine.slots == 3
        await engine.restart()
        await factory.serve(engine, model)
        assert all(len(part.actions) == 8 for part in await factory.together(engine, asked))
        await engine.close()

    factory.run(scenario())


def test_an_engine_that_slept_serves_the_next_version_as_if_it_had_not() -> None:
    async def scenario() -> None:
        model = factory.make_model()
        awake, sleeper = (factory.make_engine(model, name=f"engine/{n}", checks=True) for n in range(2))
        asked = factory.request("a", [1, 2, 3], count=12)
        for engine in (awake, sleeper):
            await factory.serve(engine, model, 0)
        await sleeper.pause()
        await sleeper.sleep()
        await sleeper.resume()
        assert sleeper.receiver.version == -1 and sleeper._thread is None, "nothing is left of the model"
        for engine in (awake, sleeper):
            await factory.serve(engine, factory.make_model(seed=1), 1)
        assert awake._receiver.checksum == sleeper._receiver.checksum != ""  # type: ignore[attr-defined]
        answers = [(await factory.together(engine, [asked]))[0].actions for engine in (awake, sleeper)]
        assert answers[0] == answers[1] and len(answers[0]) == 12
        before = awake._receiver.checksum  # type: ignore[attr-defined]
        await factory.serve(awake, model, 2)
        assert awake._receiver.checksum != before, "other weights have another checksum"  # type: ignore[attr-defined]
        for engine in (awake, sleeper):
            await engine.close()

    factory.run(scenario())


@pytest.mark.parametrize("make_core", [None, make_block_core], ids=["steps", "blocks"])
def test_an_engine_with_one_set_of_weights_replaces_them_and_makes_no_token_meanwhile(make_core: Any) -> None:
    async def scenario() -> None:
        old, new = factory.make_model(), factory.make_model(seed=1)
        settings = NativeSettings(slots=4, slot_tokens=128, stream_tokens=1, spare_weights=False)
        options = {"make_core": make_core, "checks": True}
        engine, plain = (NativeEngine(str(n), factory.make_model, settings, **options) for n in range(2))
        await factory.serve(engine, old, 0)
        begun = asyncio.Event()
        progress = Progress(on_chunk=lambda actions: begun.set())
        running = asyncio.ensure_future(engine.generate(factory.request("a", [1, 2, 3], count=100), progress))
        await begun.wait()
        manifest, buckets = factory.version_of(new, 1)
        await engine.receiver.begin(manifest)
        for bucket in buckets[: len(buckets) // 2]:
            await engine.receiver.load(bucket)
        made = len(progress.actions)
        await engine.resume()
        await asyncio.sleep(0.05)
        assert len(progress.actions) == made < 100, "half of a version is not served"
        await factory.serve(engine, new, 2)  # the one before was given up
        await running
        assert len(progress.actions) == 100 and {run.version for run in progress.runs} == {0, 2}
        await factory.serve(plain, new, 0)
        assert engine._receiver.checksum == plain._receiver.checksum != ""  # type: ignore[attr-defined]
        asked = factory.request("b", [4, 5], count=12)
        first, second = [(await factory.together(one, [asked]))[0].actions for one in (engine, plain)]
        assert first == second
        for one in (engine, plain):
            await one.close()

    factory.run(scenario())


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
def test_an_engine_that_sleeps_leaves_nothing_for_the_garbage_collector(family: str, monkeypatch: Any) -> None:
    """Frozen objects are never collected, and memory that is freed later is not given back to the device."""

    async def scenario() -> None:
        made: list[weakref.ref[Any]] = []
        arrived: list[weakref.ref[Any]] = []
        left: list[list[Any]] = []

        def make_model() -> Any:
            made.append(weakref.ref(model := families.make_family(family)))
            return model

        def make_core(*args: Any) -> Any:
            parameters, core = make_block_core(*args)
            made.extend(weakref.ref(one) for one in (parameters, core, core._runner, core._runner.kv))  # type: ignore[attr-defined]
            return parameters, core

        def see_install(parameters: DeviceParameters, values: Any) -> None:
            arrived.append(weakref.ref(next(iter(values.values()))[0]))
            install(parameters, values)

        install = DeviceParameters.install
        monkeypatch.setattr(DeviceParameters, "install", see_install)
        engine = NativeEngine("e", make_model, NativeSettings(slots=4, slot_tokens=64), make_core=make_core)
        for version in range(2):
            await factory.serve(engine, families.make_family(family), version)
        assert arrived[0]() is not None and arrived[1]() is None, "a version that was copied is gone with the flip"
        await factory.together(engine, [factory.request("a", [1, 2, 3], count=8)])
        reset = engine._receiver.reset
        engine._receiver.reset = lambda *, gone: (left.append([one() for one in (*made, *arrived)]), reset(gone=gone))  # type: ignore[method-assign, assignment, func-returns-value]
        gc.collect()
        gc.freeze()
        try:
            await engine.sleep()
            assert left == [[None] * 7], "when memory is given back, nothing of the model is left"
        finally:
            gc.unfreeze()
        await engine.close()

    factory.run(scenario())
