"""Strings to draw: what is held out is held out everywhere."""

from __future__ import annotations

import pytest

from headway.config import load_config
from headway.data import make_sources
from headway.data.generated_tasks import StringSet, is_held_out
from headway.errors import ConfigError
from headway.seeding import make_rng
from tests.data_sources.factory import Characters, epoch


def test_a_fifth_is_held_out_and_never_trained() -> None:
    every = [f"{number:04d}" for number in range(10_000)]
    assert 0.18 < sum(map(is_held_out, every)) / len(every) < 0.22
    rng = make_rng(0)
    assert not any(is_held_out(StringSet().draw_trained(rng)) for _ in range(200))
    assert all(map(is_held_out, StringSet().list_held_out(50)))
    assert StringSet().list_held_out(50) == StringSet().list_held_out(50) != StringSet().list_held_out(50, seed=1)


def test_lengths_and_letters_are_as_asked_for() -> None:
    strings = StringSet(alphabet="ab", shortest=1, longest=3)
    found = strings.list_distinct(100, 0)
    assert len(found) == len(set(found)) == 2 + 4 + 8
    assert {len(text) for text in found} == {1, 2, 3} and set("".join(found)) == {"a", "b"}
    with pytest.raises(ConfigError, match="not so many"):
        strings.list_held_out(14)


def test_a_run_trains_on_strings_and_validates_on_others() -> None:
    data_args = {"file_name": "strings", "template": "none", "options": {"size": 200, "longest": 5}}
    made = make_sources(load_config({"actor_train": {"data_args": data_args}, "pretrain": "x"}), Characters())
    train, held_out = ([task.data for task in epoch(source)] for source in (made.train, made.validation))
    assert len(train) + len(held_out) == 200 and 20 < len(held_out) < 60
    assert all(row["prompt"] == row["answer"] and not is_held_out(row["answer"]) for row in train)
    assert all(is_held_out(row["answer"]) for row in held_out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lenght": 3}, "is no option of strings"),
        ({"size": 0}, "no such number"),
        ({"longest": 2}, "between 1 and longest"),
        ({"alphabet": "1"}, "two or more"),
        ({"alphabet": 12}, "is no text"),
        ({"longest": "5"}, "number of letters"),
    ],
)
def test_options_that_make_no_strings_are_refused(options: dict[str, object], message: str) -> None:
    data_args = {"file_name": "strings", "options": options}
    with pytest.raises(ConfigError, match=message):
        make_sources(load_config({"actor_train": {"data_args": data_args}, "pretrain": "x"}), Characters())
