"""Who runs when, without a model: tokens are made up, and KV is a list of tokens that is checked in every step."""

from __future__ import annotations

import random

from headway.engines.engine_thread import RequestUpdate
from headway.engines.native.kv_slots import NativeSequence, RowSlots
from headway.engines.native.native_scheduler import NativeScheduler, StepPlan
from headway.engines.native.settings import NativeSettings
from headway.engines.native.slot_attention import cut_into_segments
from headway.types import FinishReason

from .factory import request


class Memory:
    """KV as the tokens it was made from."""

    def __init__(self, slots: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(slots)]
        self.kept: dict[int, list[int]] = {}

    def copy(self, source: int, target: int, length: int) -> None:
        self.rows[target] = self.rows[source][:length]

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None:
        a, b = self.rows[one][:one_length], self.rows[other][:other_length]
        self.rows[one], self.rows[other] = b, a

    def save(self, prefix: int, row: int, length: int) -> None:
        self.kept[prefix] = self.rows[row][:length]

    def restore(self, prefix: int, row: int, length: int) -> None:
        self.rows[row] = self.kept[prefix][:length]

    def drop(self, prefix: int) -> None:
        del self.kept[prefix]


class Bench:
    """A scheduler, its memory, and a model that says anything."""

    def __init__(self, **settings: int) -> None:
        self.settings = NativeSettings(**settings)
        self.memory = Memory(self.settings.slots)
        self.slots = RowSlots(self.settings, self.memory)
        self.scheduler = NativeScheduler(self.settings, self.slots, eos=frozenset({0}))
        self.sequences: dict[int, NativeSequence] = {}

    def add(
        self, number: int, prompt: list[int], *, group: int = -1, count: int = 5, session: str = ""
    ) -> NativeSequence:
        asked = request(str(number), prompt, group=group, count=count, session=session, continues=bool(session))
        sequence = NativeSequence(asked, (), number=number, slot_tokens=self.settings.slot_tokens)
        self.sequences[number] = sequence
        self.scheduler.add(sequence)
        return sequence

    def step(self, chance: random.Random | None = None) -> tuple[StepPlan, list[RequestUpdate]]:
        plan = self.scheduler.plan()
        pieces = [(sequence, 1) for sequence in plan.ready] + [(fill.sequence, fill.count) for fill in plan.prefills]
        for row, sequence in enumerate(plan.ready):
            assert sequence.row == row, "those that decode fill the rows from 0"
        assert len({sequence.row for sequence, _ in pieces}) == len(pieces)
        for sequence, count in pieces:
            kv = self.memory.rows[sequence.row][: sequence.cached]
            assert kv == sequence.tokens[: sequence.cached], "the slot holds this sequence and nothing else"
            self.memory.rows[sequence.row] = sequence.tokens[: sequence.cached + count]
        tokens = [(chance or random.Random(1)).randint(0 if chance else 1, 9) for _ in plan.drawing]
        return plan, self.scheduler.commit(plan, tokens, [0.0] * len(tokens))


def test_a_long_prompt_is_filled_in_pieces_while_others_decode() -> None:
    bench = Bench(slots=2, slot_tokens=100, prefill_tokens=10)
    bench.add(0, [1], count=50)
    bench.step()
    bench.add(1, [1] * 35)
    shapes = []
    for _ in range(5):
        plan, _ = bench.step()
        shapes.append((len(plan.ready), [fill.count for fill in plan.prefills]))
    assert shapes == [(1, [10]), (1, [10]), (1, [10]), (1, [5]), (2, [])]


def test_a_free_slot_takes_the_next_request_at_the_next_step() -> None:
    bench = Bench(slots=1, slot_tokens=20, prefill_tokens=20)
    bench.add(0, [1, 2], count=1)
    bench.add(1, [3, 4], count=1)
    assert [delivery.number for delivery in bench.step()[1]] == [0]
    assert [delivery.number for delivery in bench.step()[1]] == [1]
    assert not bench.scheduler.busy


def test_an_answer_that_nobody_watches_is_reported_in_larger_pieces_and_whole() -> None:
    bench = Bench(slots=2, slot_tokens=100, prefill_tokens=10, stream_tokens=2)
    bench.add(1, [5], count=12)
    bench.add(2, [6], count=12).least_report = 5
    sizes: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(12):
        for update in bench.step()[1]:
            sizes[update.number].append(len(update.actions))
    assert sizes == {1: [2] * 6, 2: [5, 5, 2]}


def test_siblings_wait_for_the_prompt_and_strangers_pass() -> None:
    bench = Bench(slots=4, slot_tokens=40, prefill_tokens=8)
    for number in range(3):
        bench.add(number, [5] * 16, group=1)
    bench.add(3, [6] * 2)
    first, _ = bench.step()
    assert [fill.sequence.number for fill in first.prefills] == [0]
    second, _ = bench.step()
    assert [fill.sequence.number for fill in second.prefills] == [0]
    third, _ = bench.step()
    assert sorted(s.number for s in third.ready) == [0, 1, 2] and bench.slots.prefixes.shared_prompts == 2


def test_when_the_one_who_fills_leaves_another_takes_over() -> None:
    bench = Bench(slots=4, slot_tokens=40, prefill_tokens=8)
    for number in range(2):
        bench.add(number, [5] * 16, group=1)
    bench.step()
    delivery = bench.scheduler.remove(0)
    assert delivery is not None and delivery.finish is FinishReason.ABORTED
    plan, _ = bench.step()
    assert [fill.sequence.number for fill in plan.prefills] == [1]


def test_any_order_of_joining_leaving_and_flipping_keeps_every_slot_to_its_owner() -> None:
    continued = 0
    for seed in range(60):
        chance = random.Random(seed)
        bench = Bench(
            slots=chance.randint(1, 5), slot_tokens=40, prefill_tokens=chance.randint(1, 12), prefix_tokens=30
        )
        ended: dict[int, RequestUpdate] = {}
        made: dict[int, list[int]] = {}
        waiting = list(range(30))
        while waiting or bench.scheduler.busy:
            for _ in range(min(len(waiting), chance.randint(0, 3))):
                number = waiting.pop(0)
                if number % 3:
                    prompt = [number // 4 + 1] * chance.choice((1, 7, 20))
                    bench.add(number, prompt, group=number // 4, count=chance.randint(1, 15))
                    continue
                episode, last = f"e{number % 2}", bench.sequences.get(number - 6)
                said = last.tokens[: chance.choice((3, 25))] if last is not None else []
                bench.add(number, [*said, number], count=chance.randint(1, 15), session=episode)
            _, news = bench.step(chance)
            if chance.random() < 0.1 and (gone := bench.scheduler.remove(chance.randrange(30))):
                news.append(gone)
            if chance.random() < 0.05:
                news += bench.scheduler.flush()
                bench.scheduler.forget_shared_prefixes()
                assert not bench.memory.kept
            for delivery in news:
                assert delivery.number not in ended, "nothing comes after the end"
                made.setdefault(delivery.number, []).extend(delivery.actions)
                if delivery.finish is not None:
                    ended[delivery.number] = delivery
        assert len(ended) == 30
        for number, sequence in bench.sequences.items():
            assert made[number] == sequence.tokens[sequence.prompt_length :]
        assert sum(map(len, bench.memory.kept.values())) <= 30
        continued += bench.slots.prefixes.continued_turns
    assert continued > 60


def test_rows_are_cut_where_padding_would_cost_more_than_a_call() -> None:
    assert cut_into_segments([10, 12, 11, 9]) == [4]
    assert cut_into_segments([1000, 1000, 10, 10]) == [2, 4]
    assert cut_into_segments([]) == []
    lengths = [random.Random(3).randint(1, 2000) for _ in range(24)]
    ends = cut_into_segments(lengths)
    assert ends[-1] == 24 and ends == sorted(set(ends))
