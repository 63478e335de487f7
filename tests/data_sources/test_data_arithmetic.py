"""The built-in tasks: right answers, no problem twice, and a part that is never trained."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import ConfigError
from headway.types import Task
from tests.data_sources.factory import epoch, sources, text_of


def problems(tasks: list[Task]) -> set[str]:
    return {task.data["prompt"] for task in tasks}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("addition", {}, 100),
        ("arithmetic", {}, 255),
        ("arithmetic", {"negative": True}, 300),
        ("arithmetic", {"operations": "+−"}, 155),
        ("arithmetic", {"operations": ["*"], "digits": 2, "size": 500}, 500),
        ("arithmetic", {"digits": 6, "size": 50}, 50),
    ],
)
def test_answers_are_right_and_a_fifth_is_held_out(name: str, options: dict[str, Any], count: int, seed: int) -> None:
    made = sources({"file_name": name, "options": options}, seed=seed)
    train, held_out = epoch(made.train), epoch(made.validation)
    assert len(train) + len(held_out) == len(problems(train) | problems(held_out)) == count
    assert len(held_out) == count // 5
    assert made.notes == ()
    for task in train + held_out:
        assert str(eval(task.data["prompt"].removesuffix(" = ?").replace("×", "*"))) == task.data["answer"]
        assert text_of(task) == f"<u>{task.data['prompt']}<a>"
        largest = 10 ** options.get("digits", 1)
        assert all(int(word) < largest for word in task.data["prompt"].split() if word.isdigit())


def test_the_seed_decides_what_is_held_out() -> None:
    first, second, again = (epoch(sources({"file_name": "arithmetic"}, seed=seed).validation) for seed in (1, 2, 1))
    assert problems(first) == problems(again) != problems(second)


def test_validation_by_name_is_the_same_held_out_part() -> None:
    args = {"file_name": "arithmetic", "options": {"digits": 2, "size": 400}}
    implied, named = sources(args), sources(args, {"file_name": "arithmetic"})
    assert problems(epoch(implied.validation)) == problems(epoch(named.validation))
    assert problems(epoch(implied.train)) == problems(epoch(named.train))


def test_nothing_is_held_out_where_that_is_asked_for() -> None:
    made = sources({"file_name": "addition", "holdout": 0})
    assert (len(made.train), made.validation) == (100, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"negative": 1}, r"options\.negative = 1: must be true or false"),
        ({"digit": 2}, r"options\.digit = 2: is no option of arithmetic, did you mean 'digits'\?"),
        ({"digits": 0}, r"options\.digits = 0.*from 1 to 9"),
        ({"digits": "2"}, r"options\.digits = '2'"),
        ({"size": 1}, r"options\.size = 1"),
        ({"operations": "+/"}, r"options\.operations = '\+/'"),
        ({"operations": "++"}, r"options\.operations"),
        ({"operations": 3}, r"options\.operations"),
        ({"seed": -1}, r"options\.seed = -1"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sources({"file_name": "arithmetic", "options": options})
