"""Sources: random access, epochs, shuffling, and files that are refused with the line that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data import ListSource
from headway.data.data_files import read_json_lines
from headway.errors import ConfigError
from headway.types import Task


def make_tasks(count: int) -> list[Task]:
    return [Task(position=0, data={"n": number}) for number in range(count)]


def numbers(source: ListSource, positions: range) -> list[int]:
    found = [source.task(position) for position in positions]
    return [task.data["n"] for task in found if task is not None]


@given(count=st.integers(1, 20), epochs=st.integers(1, 4), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_epoch_gives_each_task_once_and_then_the_source_ends(
    count: int, epochs: int, seed: int, shuffle: bool
) -> None:
    source = ListSource(make_tasks(count), seed=seed, epochs=epochs, shuffle=shuffle)
    for epoch in range(epochs):
        assert sorted(numbers(source, range(epoch * count, (epoch + 1) * count))) == list(range(count))
    assert source.task(epochs * count) is None


@given(positions=st.lists(st.integers(0, 200), max_size=40), seed=st.integers(0, 9))
def test_a_position_is_the_same_task_in_whatever_order_it_is_asked(positions: list[int], seed: int) -> None:
    source = ListSource(make_tasks(7), seed=seed, epochs=None)
    for position in positions:
        fresh = ListSource(make_tasks(7), seed=seed, epochs=None)
        assert source.task(position) == fresh.task(position)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = ListSource(make_tasks(50), seed=1, epochs=None)
    first, second = numbers(source, range(50)), numbers(source, range(50, 100))
    assert first != second != list(range(50))
    assert first != numbers(ListSource(make_tasks(50), seed=2, epochs=None), range(50))


def test_unshuffled_tasks_keep_their_order_and_carry_their_position() -> None:
    source = ListSource(make_tasks(3), epochs=2, shuffle=False)
    assert numbers(source, range(6)) == [0, 1, 2, 0, 1, 2]
    task = source.task(4)
    assert task is not None
    assert task.position == 4


def test_an_empty_list_and_impossible_epochs_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        ListSource([])
    with pytest.raises(ConfigError, match="epochs = 0"):
        ListSource(make_tasks(1), epochs=0)
    with pytest.raises(IndexError):
        ListSource(make_tasks(1)).task(-1)


def test_json_lines_are_numbered_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1+1?", "answer": "2"}\n\n{"prompt": "é"}', encoding="utf-8")
    assert list(read_json_lines(path, key="x")) == [(1, {"prompt": "1+1?", "answer": "2"}), (3, {"prompt": "é"})]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', r"tasks\.jsonl:2: not JSON"),
        ("[1]\n", r"tasks\.jsonl:1: list instead of an object"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        list(read_json_lines(path, key="x"))


def test_a_missing_file_and_a_file_that_is_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl.*No such file"):
        list(read_json_lines(tmp_path / "nowhere.jsonl", key="x"))
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        list(read_json_lines(path, key="x"))
