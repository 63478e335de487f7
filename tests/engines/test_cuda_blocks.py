"""Engines that work in blocks of steps: with a GPU on it, everywhere on the CPU with the plain operations."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from typing import Any

import pytest
import torch

from headway.engines.base import Progress
from headway.engines.native import native_core, native_engine
from headway.engines.native.block_ops import BlockOps, draw_uniform, make_draw_key
from headway.engines.native.decode_graphs import choose_splits, round_up_lanes
from headway.engines.native.kv_slots import NativeSequence
from headway.engines.native.model_decoders import FusedDecoder, GenericDecoder, make_decoder
from headway.engines.native.native_core import NativeCore
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.served_parameters import ServedParameters
from headway.engines.native.settings import NativeSettings
from headway.errors import ConfigError, EngineCrashed
from headway.types import FinishReason

from .factory import FAMILIES, VOCABULARY, counting_model, make_engine, make_model, request, run, serve, together, worst

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])]
if not torch.cuda.is_available():
    DEVICES.pop()


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCABULARY) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def as_made(parameters: ServedParameters, core: NativeCore) -> tuple[ServedParameters, NativeCore]:
    return parameters, core


def in_blocks(model: Any, *, plain: bool = False, wrap: Any = as_made, **options: Any) -> NativeEngine:
    def make_core(
        made: Any, settings: NativeSettings, eos: frozenset[int], stopped: Any
    ) -> tuple[ServedParameters, NativeCore]:
        parameters, runner = native_core.make_block_runner(
            made, settings, eos, (lambda model, ops, positions: GenericDecoder(model)) if plain else make_decoder
        )
        scheduler = native_core.make_block_scheduler(settings, runner, eos, stopped)
        return wrap(parameters, native_core.BlockCore(scheduler, runner))

    return make_engine(model, make_core=make_core, **({"steps_per_sync": 3} | options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_a_full_forward(family: str, plain: bool, device: str) -> None:
    async def scenario() -> None:
        model = make_model(family)
        served = in_blocks(model, plain=plain, device=device)
        await serve(served, model)
        asked = [request(str(n), prompt, temperature=(1.0, 0.7, 1.3)[n % 3]) for n, prompt in enumerate(prompts(6))]
        for each, progress in zip(asked, await together(served, asked), strict=True):
            assert len(progress.actions) == 20
            assert worst(model, each, progress) < (1e-4 if device == "cpu" else 1e-2)
        await served.close()

    run(scenario(), timeout_s=200.0)


def test_families_like_llama_get_the_fused_decoder_and_others_the_plain_one() -> None:
    settings = NativeSettings(slots=2, slot_tokens=16)
    for family in FAMILIES:
        model = make_model(family)
        native_core.DeviceParameters(model, torch.float32, torch.device("cpu"))
        assert isinstance(make_decoder(model, BlockOps(), settings.slot_tokens), FusedDecoder)
    other = make_model("llama", hidden_act="gelu")
    native_core.DeviceParameters(other, torch.float32, torch.device("cpu"))
    assert isinstance(make_decoder(other, BlockOps(), settings.slot_tokens), GenericDecoder)


def test_the_same_tokens_are_drawn_as_step_by_step() -> None:
    async def scenario() -> None:
        model = make_model("qwen3")
        asked = [request(str(n), prompt, count=5 + 3 * n) for n, prompt in enumerate(prompts(8))]
        answers = []
        for served in (
            make_engine(model, eos=[11]),
            in_blocks(model, eos=[11]),
            in_blocks(model, eos=[11], steps_per_sync=7),
        ):
            await serve(served, model)
            answers.append([list(progress.actions) for progress in await together(served, asked)])
            await served.close()
        assert answers[0] == answers[1] == answers[2]

    run(scenario())


def behind(parameters: ServedParameters, core: NativeCore) -> tuple[ServedParameters, NativeCore]:
    """A device that is always far behind the host, as where others use it too."""
    runner: Any = core._runner  # type: ignore[attr-defined]
    launch = runner.launch

    def launched(plan: Any) -> Any:
        with runner.kv.on_stream():
            torch.cuda._sleep(10_000_000)
        return launch(plan)

    runner.launch = launched
    return parameters, core


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_many_requests_through_eight_slots_leave_no_trace_in_each_other(device: str, late: bool) -> None:
    if late and device == "cpu":
        pytest.skip("a CPU has no stream that could be behind")
    count = 50 if device == "cpu" else 200

    async def scenario() -> None:
        model = make_model("qwen2")
        served = in_blocks(
            model,
            slots=8,
            prefill_tokens=24,
            prefix_tokens=120,
            eos=[11],
            device=device,
            wrap=behind if late else as_made,
        )
        await serve(served, model)
        chance = random.Random(1)
        pool = prompts(40, seed=2)
        asked = [
            request(str(n), pool[n // 5], group=n // 5 if n % 3 else -1, count=chance.randint(1, 30))
            for n in range(count)
        ]
        chance.shuffle(asked)
        for each, progress in zip(asked, await together(served, asked), strict=True):
            assert worst(model, each, progress) < (1e-4 if device == "cpu" else 1e-2)
            assert len(progress.actions) == each.params.max_new_tokens or progress.actions[-1] == 11
            assert 11 not in list(progress.actions)[:-1], "nothing comes after the end"
        await served.close()

    run(scenario(), timeout_s=200.0)


@pytest.mark.parametrize("device", DEVICES)
def test_other_weights_come_between_two_tokens_and_every_token_says_whose_it_is(device: str) -> None:
    async def scenario() -> None:
        first, second = make_model(), make_model(seed=7)
        served = in_blocks(first, device=device, slot_tokens=400)
        await serve(served, first)
        progress = Progress()
        begun = asyncio.Event()
        progress.on_chunk = lambda actions: begun.set()
        asked = request(count=380)
        task = asyncio.create_task(served.generate(asked, progress))
        await begun.wait()
        await serve(served, second, 1)
        assert await task is FinishReason.LENGTH
        old, new = progress.runs
        assert (old.version, new.version) == (0, 1) and old.count + new.count == len(progress.actions) == 380
        part = Progress()
        part.extend(list(progress.actions)[: old.count], list(progress.logps)[: old.count], 0)
        assert worst(first, asked, part) < (1e-4 if device == "cpu" else 1e-2)
        again, fresh = Progress(), request("b", count=20)
        await served.generate(fresh, again)
        assert worst(second, fresh, again) < (1e-4 if device == "cpu" else 1e-2)
        await served.close()

    run(scenario(), timeout_s=200.0)


def test_prompts_kept_under_old_weights_are_not_given_to_new_ones() -> None:
    async def scenario() -> None:
        first, second = make_model(), make_model(seed=7)
        served = in_blocks(first)
        prompt = prompts(1, seed=5)[0] * 2
        for version, model in enumerate((first, second)):
            await serve(served, model, version)
            asked = [request(f"{version}/{n}", prompt, group=1) for n in range(4)]
            for each, progress in zip(asked, await together(served, asked), strict=True):
                assert worst(model, each, progress) < 1e-4
        await served.close()

    run(scenario())


def test_a_stop_string_ends_inside_a_block() -> None:
    async def scenario() -> None:
        model = counting_model()
        served = in_blocks(model, steps_per_sync=5, decode=lambda tokens: "".join(f"{token:02x}" for token in tokens))
        await serve(served, model)
        progress = Progress()
        assert await served.generate(request(stop=("zz", "213"), count=60), progress) is FinishReason.STOP
        assert list(progress.actions) == list(range(4, 0x14))
        await served.close()

    run(scenario())


def test_a_pause_and_an_abort_keep_what_was_made_and_a_resumed_answer_goes_on() -> None:
    async def scenario() -> None:
        model = counting_model()
        served = in_blocks(model, slot_tokens=200)
        await serve(served, model)
        progress, begun = Progress(), asyncio.Event()
        progress.on_chunk = lambda actions: begun.set()
        task = asyncio.create_task(served.generate(request(count=110), progress))
        await begun.wait()
        await served.pause()
        made = list(progress.actions)
        assert made == [n % 128 for n in range(4, 4 + len(made))]
        await served.abort("a")
        assert await task is FinishReason.ABORTED and list(progress.actions) == made
        await served.resume()
        assert await served.generate(request(count=110), progress) is FinishReason.LENGTH
        assert list(progress.actions) == [n % 128 for n in range(4, 114)]
        await served.close()

    run(scenario())


def test_logits_that_are_not_numbers_are_named() -> None:
    async def scenario() -> None:
        model = make_model()
        served = in_blocks(model)
        with torch.no_grad():
            model.get_output_embeddings().weight[0, 0] = float("nan")
        await serve(served, model)
        with pytest.raises(EngineCrashed, match="not finite"):
            await served.generate(request(), Progress())
        await served.close()

    run(scenario())


def test_the_device_draws_with_the_numbers_of_the_sequence() -> None:
    sequence = NativeSequence(request("a", [5, 6, 7]), (8, 9), slot_tokens=100, seed=3)
    key = make_draw_key(sequence.key, sequence.prompt_length)
    assert draw_uniform(key, len(sequence.tokens) - 1) == sequence.next_uniform()
    sequence.append(4, 0.0)
    assert draw_uniform(key, len(sequence.tokens) - 1) == sequence.next_uniform()


def test_a_replica_that_broke_frees_its_memory_though_its_error_is_kept() -> None:
    async def scenario() -> None:
        model = make_model()
        served = in_blocks(model)
        runners: list[weakref.ref[Any]] = []
        await serve(served, model)
        await served._get_thread().call(lambda core: runners.append(weakref.ref(core._runner)) or [])
        with torch.no_grad():
            model.get_output_embeddings().weight[0, 0] = float("nan")
        await serve(served, model, 1)
        with pytest.raises(EngineCrashed) as kept:
            await served.generate(request(), Progress())
        await served.restart()
        assert kept.value.__cause__ is not None and runners[0]() is None
        await served.close()

    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device"):
        NativeSettings(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            native_engine.make_block_core(
                make_model(), NativeSettings(device="cuda"), frozenset(), lambda sequence: False
            )


def test_sizes_of_steps_waste_little_and_are_few() -> None:
    sizes = {round_up_lanes(lanes, 512) for lanes in range(1, 513)}
    assert all(lanes <= round_up_lanes(lanes, 512) <= max(lanes * 1.27, lanes + 15) for lanes in range(1, 513))
    assert len(sizes) <= 26 and max(sizes) == 512
    assert [round_up_lanes(lanes, 7) for lanes in (1, 3, 5, 7)] == [1, 4, 7, 7]
    assert choose_splits(512, 2, 600) == 1 and choose_splits(512, 2, 4000) == 2
    assert choose_splits(1, 2, 4000) == 16 and choose_splits(64, 2, 300) == 1 and choose_splits(1, 1, 10) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (6, 3, 96), (8, 2, 128)])
def test_bfloat16_stays_close_to_a_full_forward(heads: int, kv_heads: int, head_dim: int) -> None:
    async def scenario() -> None:
        model = make_model(
            "qwen3",
            hidden_size=512,
            intermediate_size=1024,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            initializer_range=0.02,
        )
        for tensor in model.parameters():  # buffers stay as they are: rotations are not rounded
            tensor.data = tensor.data.bfloat16().float()
        served = in_blocks(model, device="cuda", dtype="bfloat16", slots=32, slot_tokens=400)
        await serve(served, model, dtype=torch.bfloat16)
        asked = [request(str(n), prompt, count=300) for n, prompt in enumerate(prompts(32))]
        for each, progress in zip(asked, await together(served, asked), strict=True):
            # Rounding what each module returns to bfloat16 moves 2,500 such tokens by up to 0.013 (0.0023 on average).
            assert worst(model, each, progress) < 2e-2
        await served.close()

    run(scenario(), timeout_s=200.0)
