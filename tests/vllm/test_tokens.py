"""What a real vLLM makes is what its weights make, and carries their version."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from headway.engines.base import Engine, Progress, Request
from headway.errors import EngineCrashed, TransferError
from headway.types import FinishReason, SamplingParams
from tests.engines import factory
from tests.vllm.server_pool import SERVER, SHAPE, ServerPool, exact

FLIPS, REQUESTS, LENGTH = 4, 4, 400
FIRST_WORD = 10
"""Token that version 0 says: those before it have a meaning for the tokenizer, and its end of text ends SGLang's."""


def make_request(count: int, prompt: tuple[int, ...] = (1, 2, 3), name: str = "a", **params: object) -> Request:
    options = SamplingParams(max_new_tokens=count, **params)  # type: ignore[arg-type]
    return Request(request_id=name, session=name, prompt=prompt, params=options)


@exact
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_model_after_the_temperature(place: ServerPool, temperature: float) -> None:
    async def scenario() -> None:
        engine = place.engine()
        await factory.serve(engine, place.random, 0)
        requests = [make_request(60, (5, 9, n), str(n), temperature=temperature) for n in range(6)]
        for request, progress in zip(requests, await factory.together(engine, requests), strict=True):
            assert len(progress.actions) == 60
            assert factory.worst(place.random, request, progress) < 1e-3

    place.run(scenario())


@exact
@pytest.mark.skipif(SERVER == "sglang", reason="SGLang's are those before top-k, and a run says so")
def test_log_probabilities_are_those_of_what_was_drawn_from(place: ServerPool) -> None:
    """After top-k: one of three, and their probabilities are one together."""

    async def scenario() -> None:
        engine = place.engine()
        await factory.serve(engine, place.random, 0)
        progress, request = Progress(), make_request(40, temperature=1.5, top_k=3)
        assert await engine.generate(request, progress) is FinishReason.LENGTH
        full = factory.full_logps(place.random, request.prompt, progress.actions, 1.5)
        best = full.topk(3, dim=-1)
        chosen = torch.tensor(list(progress.actions))[:, None]
        assert (best.indices == chosen).any(dim=-1).all()
        exact = full.gather(1, chosen)[:, 0] - best.values.logsumexp(-1)
        assert float((exact - torch.tensor(list(progress.logps))).abs().max()) < 1e-3

    place.run(scenario())


@exact
def test_a_greedy_request_takes_the_likeliest(place: ServerPool) -> None:
    async def scenario() -> None:
        engine = place.engine()
        await factory.serve(engine, place.random, 0)
        progress, request = Progress(), make_request(40, temperature=0.0)
        await engine.generate(request, progress)
        full = factory.full_logps(place.random, request.prompt, progress.actions)
        assert full.argmax(-1).tolist() == list(progress.actions)

    place.run(scenario())


def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(place: ServerPool) -> None:
    from headway.models.tiny_model import make_character_tokenizer

    tokenizer = make_character_tokenizer()
    stop = tokenizer.decode([30, 31])

    async def scenario() -> None:
        engine = place.engine(decode=tokenizer.decode)
        await factory.serve(engine, place.counting, 0)
        progress = Progress()
        assert await engine.generate(make_request(60, (20,), stop=(stop,)), progress) is FinishReason.STOP
        assert list(progress.actions) == list(range(21, 32))

    place.run(scenario())


def always(version: int) -> PreTrainedModel:
    """A version that says one thing: its own number, after `FIRST_WORD`."""
    model = factory.counting_model(**SHAPE)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
        head = model.get_output_embeddings().weight
        head.zero_()
        head[FIRST_WORD + version] = 1.0
    return model


async def ask(engine: Engine, name: str, made: list[Progress], over: asyncio.Event) -> None:
    """Generate one request after the other until `over`, each to its end, also where somebody aborts it on the way."""
    while not over.is_set():
        progress = Progress()
        made.append(progress)
        while await engine.generate(make_request(LENGTH, name=name), progress) is FinishReason.ABORTED:
            pass


async def disturb(
    engine: Engine, made: Sequence[Progress], chance: random.Random, load: Callable[[int], Awaitable[None]]
) -> None:
    """Update, pause and abort, each time after some tokens more. `load` brings a version up to its flip."""
    for version in range(1, FLIPS + 1):
        await load(version)
        await wait_for_tokens(made, chance.randrange(5, 20))
        paused = chance.random() < 0.5
        if paused:
            await engine.pause()
        if chance.random() < 0.7:
            await engine.abort(str(chance.randrange(REQUESTS)))
        await engine.receiver.flip()
        if paused:
            await engine.resume()
        await wait_for_tokens(made, 1)


async def wait_for_tokens(made: Sequence[Progress], count: int) -> None:
    """Wait until `count` tokens more have been made."""
    target = sum(len(progress.actions) for progress in made) + count
    while sum(len(progress.actions) for progress in made) < target:  # noqa: ASYNC110 — nobody tells
        await asyncio.sleep(0.002)


async def check_versions_of_tokens(engine: Engine, seed: int, load: Callable[[int], Awaitable[None]]) -> None:
    """Disturb requests to weights that say their own version, and compare.

    Requests follow one another until the last update: vLLM makes all tokens of a request in two seconds, and on busy
    cores it is done before this process has read the first of them. With a fixed number of requests there may be
    nothing left for the later versions to make.
    """
    made: list[Progress] = []
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for number in range(REQUESTS):
            tasks.create_task(ask(engine, str(number), made, over))
        await disturb(engine, made, random.Random(seed), load)
        over.set()
    for progress in made:
        said = [FIRST_WORD + run.version for run in progress.runs for _ in range(run.count)]
        assert list(progress.actions) == said and len(said) == LENGTH
    assert {run.version for progress in made for run in progress.runs} == set(range(FLIPS + 1))


@pytest.mark.parametrize("seed", range(2))
def test_every_token_carries_the_version_that_made_it(place: ServerPool, seed: int) -> None:
    async def scenario() -> None:
        engine = place.engine()
        versions = {n: factory.version_of(always(n), n, bucket_bytes=1 << 24) for n in range(1, FLIPS + 1)}

        async def load(version: int) -> None:
            manifest, buckets = versions[version]
            await engine.receiver.begin(manifest)
            for bucket in buckets:
                await engine.receiver.load(bucket)

        await factory.serve(engine, always(0), 0)
        await check_versions_of_tokens(engine, seed, load)

    place.run(scenario())


def other_names() -> PreTrainedModel:
    return factory.make_model("qwen3", **SHAPE)


def test_weights_whose_names_do_not_match_never_reach_the_server(place: ServerPool) -> None:
    async def scenario() -> None:
        engine = place.engine()
        await factory.serve(engine, place.counting, 0)
        with pytest.raises(TransferError, match=r"version 1 has also .*q_norm.weight"):
            await factory.serve(engine, other_names(), 1)
        tied = factory.make_model(**SHAPE, tie_word_embeddings=True)
        with pytest.raises(TransferError, match=r"version 1 lacks lm_head.weight"):
            await factory.serve(engine, tied, 1)
        assert await engine.generate(make_request(5), Progress()) is FinishReason.LENGTH, "it serves what it had"
        assert engine.receiver.version == 0

    place.run(scenario())


@pytest.mark.skipif(
    SERVER == "sglang", reason="SGLang leaves out names that it does not know; they are compared before"
)
def test_what_the_server_says_about_weights_that_it_cannot_load_is_told(place: ServerPool) -> None:
    async def scenario() -> None:
        engine = place.engine(model_directory=None)
        await factory.serve(engine, place.counting, 0)
        with pytest.raises(EngineCrashed, match=r"no module or parameter named .*_norm"):
            await factory.serve(engine, other_names(), 1)
        assert engine.receiver.version == -1
        with pytest.raises(EngineCrashed):
            await engine.generate(make_request(5), Progress())
        place.kill("engine/0")  # it has no model any more: whoever asks it for a token ends it
        assert "SIGKILL" in await place.kept["engine/0"].wait_for_end(20.0)

    place.run(scenario())
