"""Pages on the CPU: sharing, growing, making room and coming back, with scheduler, runner and memory as on a GPU.

The model of the large test is a hash of the KV that it reads through the block tables: any wrong, lost or foreign entry
changes what is drawn. Its expectation is computed from each answer alone, as if nobody had ever made room.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.engines.base import Progress
from headway.engines.native import native_core, token_sampler
from headway.engines.native.block_ops import BlockOps, HeadShape, KeysValues, PageTable
from headway.engines.native.block_runner import BlockRunner
from headway.engines.native.kv_cache import PagedKvCache
from headway.engines.native.kv_pages import PagePool, PrefixTree
from headway.engines.native.kv_slots import NativeSequence
from headway.engines.native.native_core import BlockCore
from headway.engines.native.paged_slots import PagedSlots
from headway.engines.native.settings import NativeSettings
from headway.errors import ConfigError
from headway.types import FinishReason

from .factory import make_model, request, run, serve, together, worst
from .test_cuda_blocks import DEVICES, in_blocks, prompts

VOCABULARY = 24
HEADS = HeadShape(1, 1, 2, 1.0)


def make_logits(entries: list[tuple[int, int]]) -> Tensor:
    """Any function of every token and the version that computed its KV, and of their order."""
    value = 17
    for token, version in entries:
        value = (value * 31 + token * 7 + version) % 1_000_003
    return torch.tensor([((value * (7 + 2 * token)) % 97) / 24 - 4 * (token == 0) for token in range(VOCABULARY)])


class HashOps(BlockOps):
    """Reads the KV of every lane through its pages."""

    def decode(
        self, q_BHD: Tensor, kv: KeysValues, heads: HeadShape, pages: PageTable, lanes_B: Tensor, positions_B: Tensor,
        splits: int, sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        rows = []
        for slot, position in zip(lanes_B.tolist(), positions_B.tolist(), strict=True):
            at = torch.arange(position + 1)
            found = kv[0][
                pages.tables[slot, at // pages.page_tokens].long() * pages.page_tokens + at % pages.page_tokens
            ]
            rows.append(make_logits([(int(token), int(version)) for token, version in found[:, 0].tolist()]))
        return torch.stack(rows)


class HashModel:
    """Writes token and version as KV, and draws from a hash of all of it."""

    version = 0

    def logits(self, tokens_B: Tensor, view: Any) -> Tensor:
        self.prefill(tokens_B, view)
        found: Tensor = view.attend(0, tokens_B[:, None, None].float(), HEADS)
        return found

    def prefill(self, tokens_T: Tensor, view: Any) -> None:
        entry = torch.stack((tokens_T.float(), torch.full((len(tokens_T),), float(self.version))), dim=1)
        view.kv[0][0][view.rows] = entry[:, None]


class Weights:
    """A number is all the weights there are."""

    def __init__(self, model: HashModel) -> None:
        self._model = model

    def install(self, values: Any) -> None:
        self._model.version = values


class World:
    """A core of blocks with few pages, and a record of the version that first computed each prefilled token."""

    def __init__(self, settings: NativeSettings, pages: int, host_pages: int) -> None:
        model = HashModel()
        self.settings = settings
        self.kv = PagedKvCache(
            layers=1, heads=1, head_size=2, slots=settings.slots, slot_tokens=settings.slot_tokens,
            page_tokens=settings.page_tokens, pages=pages, host_pages=host_pages, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        decoder: Any = model
        parameters: Any = Weights(model)
        runner = BlockRunner(decoder, HashOps(), self.kv, parameters, settings, kv_heads=1, eos=frozenset({0}))
        self.core = BlockCore(
            native_core.make_block_scheduler(settings, runner, frozenset({0}), lambda sequence: False), runner
        )
        slots: Any = self.core.scheduler.slots
        self.slots: PagedSlots = slots
        self.prefilled: dict[int, list[int]] = {}
        launch = runner.launch

        def record(plan: Any) -> Any:
            for sequence in [*plan.ready, *(chunk.sequence for chunk in plan.prefills)]:
                known = self.prefilled.setdefault(sequence.number, [])
                known += [self.core.version] * (min(sequence.cached, sequence.prompt_length - 1) - len(known))
            for chunk in plan.prefills:
                known = self.prefilled[chunk.sequence.number]
                known += [self.core.version] * (chunk.sequence.cached + chunk.count - len(known))
            return launch(plan)

        runner.launch = record  # type: ignore[method-assign]

    def flip(self, version: int) -> list[Any]:
        return self.core.flip(version, version)  # type: ignore[arg-type]


def expect(asked: Any, progress: Progress, prefilled: list[int], seed: int) -> None:
    """Raise unless every token and log-probability is what the versions that made it give."""
    versions = [run.version for run in progress.runs for _ in range(run.count)]
    tokens = [*asked.prompt, *progress.actions]
    made = [*prefilled, *versions[len(prefilled) - len(asked.prompt) + 1 :]] if prefilled else list(versions)
    for number, (action, logp) in enumerate(zip(progress.actions, progress.logps, strict=True)):
        length = len(asked.prompt) + number
        logits = make_logits(list(zip(tokens[:length], made[:length], strict=True)))
        uniform = NativeSequence(asked, progress.actions[:number], slot_tokens=1000, seed=seed).next_uniform()
        drawn, exact = token_sampler.sample_tokens(logits[None], [asked.params], [uniform])
        assert (action, logp) == (drawn[0], pytest.approx(exact[0], abs=1e-6))


def make_requests(chance: random.Random, count: int) -> list[Any]:
    found = []
    for number in range(count):
        group = number // 4
        length = random.Random(group).choice((1, 3, 9, 17, 40))
        prompt = [random.Random(group * 100 + place).randrange(1, VOCABULARY) for place in range(length)]
        if group % 3 == 0:
            prompt = [*range(1, 12), *prompt]
        longest = 70 if chance.random() < 0.3 else 25
        asked = request(str(number), prompt, group=group if number % 5 else -1, count=chance.randint(1, longest))
        found.append(replace(asked, continues=number % 7 == 0, session=f"s{number % 11}"))
    return found


def drive(seed: int, count: int, *, host_pages: int, flips: float = 0.04, pages: int | None = None) -> World:
    """Answer random requests with far too few pages; checks every answer."""
    chance = random.Random(seed)
    settings = NativeSettings(
        slots=chance.randint(5, 12), slot_tokens=130, prefill_tokens=chance.randint(5, 60), steps_per_sync=3,
        page_tokens=chance.choice((4, 8)), stream_tokens=2,
    )  # fmt: skip
    longest = -(-settings.slot_tokens // settings.page_tokens)
    world = World(settings, pages or 1 + longest + chance.randint(0, longest // 2), host_pages)
    world.flip(0)
    asked, parts, ends = make_requests(chance, count), [Progress() for _ in range(count)], dict[int, FinishReason]()
    waiting, version = list(range(count)), 0
    while waiting or world.core.runnable:
        for _ in range(min(len(waiting), chance.randint(0, 4))):
            number = waiting.pop(0)
            world.core.add(NativeSequence(asked[number], (), number=number, slot_tokens=settings.slot_tokens))
        updates = world.core.step() if world.core.runnable else []
        made_by = world.core.made_by
        if chance.random() < flips:
            enter(updates, made_by, parts, ends)
            version += 1
            updates, made_by = world.flip(version), world.core.made_by
        if chance.random() < 0.02:
            enter(updates, made_by, parts, ends)
            updates, made_by = world.core.abort(chance.randrange(count)), world.core.made_by
        enter(updates, made_by, parts, ends)
    for number in range(count):
        progress, each = parts[number], asked[number]
        whole = len(progress.actions) == each.params.max_new_tokens or list(progress.actions)[-1:] == [0]
        assert number in ends and (whole or ends[number] is FinishReason.ABORTED), "nothing is lost"
        if host_pages or not flips:
            expect(each, progress, world.prefilled.get(number, []), settings.seed)
    world.slots.clear()
    assert world.slots.pool.used == 0 and world.slots.saved_pages == 0, "no page is leaked"
    assert not world.slots.ready
    return world


def enter(updates: list[Any], version: int, parts: list[Progress], ends: dict[int, FinishReason]) -> None:
    for update in updates:
        assert update.number not in ends, "nothing comes after the end"
        parts[update.number].extend(update.actions, update.logps, version)
        if update.finish is not None:
            ends[update.number] = update.finish


@pytest.mark.parametrize("host_pages", [10_000, 0, 12])
def test_with_far_too_few_pages_every_answer_is_what_it_would_be_alone(host_pages: int) -> None:
    preemptions = 0
    for seed in range(3):
        preemptions += drive(seed, 40, host_pages=host_pages, flips=0.04 if host_pages > 100 else 0.0).slots.preemptions
    assert preemptions > 10


def test_where_kv_is_computed_again_after_other_weights_nothing_is_lost() -> None:
    assert drive(5, 40, host_pages=0).slots.preemptions


def test_members_and_later_requests_share_pages_and_other_weights_do_not() -> None:
    settings = NativeSettings(slots=8, slot_tokens=80, page_tokens=8, steps_per_sync=3)
    world = World(settings, 200, 0)
    world.flip(0)
    prompt = [1 + place % 20 for place in range(61)]

    def answer(first: int, count: int) -> int:
        before = world.slots.reused_tokens
        for number in range(first, first + count):
            world.core.add(NativeSequence(request(str(number), prompt, group=1), (), number=number, slot_tokens=80))
        world.core.step()
        world.core.step()
        most = world.slots.pool.used
        while world.core.runnable:
            world.core.step()
        assert most <= 7 + 4 * count, "the pages of the prompt are there once"
        return world.slots.reused_tokens - before

    assert answer(0, 5) == 4 * 60 and answer(5, 2) == 2 * 60
    world.flip(1)
    assert answer(7, 3) == 2 * 60


def test_a_block_is_short_while_most_requests_could_join_after_it() -> None:
    world = World(NativeSettings(slots=8, slot_tokens=80, page_tokens=8, steps_per_sync=6), 100, 0)
    world.flip(0)
    steps = []
    for number in range(6):
        asked = request(str(number), range(2 if number else 1, 20), group=1 if number else -1, count=30)
        world.core.add(NativeSequence(asked, (), number=number, slot_tokens=80))
        if number in (0, 5):
            for _ in range(2):
                plan = world.core.scheduler.plan()
                world.core.scheduler.commit_prefill(plan)
                steps.append((len(plan.ready), plan.steps))
    assert steps == [(0, 1), (1, 6), (1, 1), (6, 6)]


def test_the_next_turn_begins_behind_the_last_one() -> None:
    world = World(NativeSettings(slots=2, slot_tokens=80, page_tokens=8), 50, 0)
    world.flip(0)
    first = NativeSequence(request("a", [1, 2, 3], continues=True, count=30), (), number=0, slot_tokens=80)
    world.core.add(first)
    while world.core.runnable:
        world.core.step()
    said = len(first.tokens)
    world.core.add(NativeSequence(request("b", [*first.tokens, 5, 6]), (), number=1, slot_tokens=80))
    world.core.step()
    assert world.slots.reused_tokens == said - 1


def test_a_tree_gives_up_what_was_used_least_recently_and_nothing_that_is_in_use() -> None:
    pool = PagePool(10)
    tree = PrefixTree(pool, 2)
    held = {}
    for name, tokens in {"a": [1, 2, 3, 4], "b": [1, 2, 5], "c": [7, 8, 9, 9]}.items():
        held[name] = pool.take(2)
        tree.insert(tokens, len(tokens), held[name])
    pool.release([*held["a"], *held["c"]])
    assert pool.used == 6, "one page of b is not in the tree: that stretch was there before"
    assert tree.match([1, 2, 3, 4, 5], 5)[0] == held["a"]
    tree.evict(2)
    assert tree.match([7, 8], 2) == ([], 0, 0) and tree.match([1, 2, 3, 4], 3) == (held["a"][:1], held["a"][1], 1)
    tree.evict(9)
    assert tree.match([1, 2, 5, 6], 4) == (held["a"][:1], held["b"][1], 1)
    pool.release(held["b"])
    tree.evict(9)
    assert pool.used == 0


def test_a_page_that_fills_up_is_in_the_tree_once() -> None:
    pool = PagePool(10)
    tree = PrefixTree(pool, 4)
    pages = pool.take(2)
    for length in (2, 3, 6):
        tree.insert([1, 2, 3, 4, 5, 6], length, pages)
    pool.release(pages)
    assert tree.match([1, 2, 3, 4, 5, 6], 6) == (pages[:1], pages[1], 2)
    tree.evict(2)
    assert pool.used == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("host_cache_bytes", [None, 0])
def test_a_model_with_few_pages_answers_as_with_many(device: str, host_cache_bytes: int | None) -> None:
    async def scenario() -> None:
        model = make_model("qwen2")
        page = 2 * 2 * 2 * 16 * 4 * 8
        served = in_blocks(
            model, slots=12, slot_tokens=100, page_tokens=8, kv_cache_bytes=page * 24, eos=[11], device=device,
            host_cache_bytes=host_cache_bytes,
        )  # fmt: skip
        await serve(served, model)
        asked = [
            request(str(n), prompt, group=n // 3, count=40)
            for n, prompt in enumerate(each for each in prompts(10, seed=4) for _ in range(3))
        ]
        for each, progress in zip(asked, await together(served, asked), strict=True):
            assert worst(model, each, progress) < (1e-4 if device == "cpu" else 1e-2)
            assert len(progress.actions) == 40 or list(progress.actions)[-1] == 11
        found: list[int] = []
        await served._get_thread().call(lambda core: found.append(core.scheduler.slots.preemptions) or [])
        assert found[0] > 0
        await served.close()

    run(scenario(), timeout_s=200.0)


def test_a_cache_without_room_for_one_sequence_is_refused() -> None:
    settings = NativeSettings(slots=4, slot_tokens=100, kv_cache_bytes=1000)
    with pytest.raises(ConfigError, match="a sequence of 100 tokens needs"):
        native_core.make_block_runner(make_model(), settings, frozenset())


if __name__ == "__main__":
    totals = [0, 0]
    for one in range(int(sys.argv[1])):
        for pages in (10_000, 12, 0):
            world = drive(1000 + one, 40, host_pages=pages, flips=0.0 if pages == 12 else 0.04)
            totals = [totals[0] + 40, totals[1] + world.slots.preemptions]
        print(f"{totals[0]} requests, {totals[1]} preemptions", flush=True)
