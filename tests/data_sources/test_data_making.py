"""The sources of a configuration: order, held-out rows, domains, fingerprints, memory."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from headway.data.task_table import TaskTable
from headway.errors import ConfigError
from headway.types import Task
from tests.data_sources.factory import epoch, sources, sums, write


def prompts(tasks: list[Task]) -> list[str]:
    return [task.data["prompt"] for task in tasks]


def test_a_position_is_the_same_task_in_every_process_and_epochs_never_end(tmp_path: Path) -> None:
    args = {"file_name": write(tmp_path / "a.jsonl", sums(20))}
    first, second = sources(args).train, sources(args).train
    for position in (57, 3, 1003, 0, 57):
        task = first.task(position)
        assert task is not None
        assert task == second.task(position)
        assert task.position == position
    assert sorted(prompts(epoch(first, 20))) == sorted(prompts(epoch(first)))
    assert prompts(epoch(first, 20)) != prompts(epoch(first))


@pytest.mark.parametrize("shuffle", [True, False])
def test_some_rows_can_be_trained_instead_of_all(tmp_path: Path, shuffle: bool) -> None:
    args = {"file_name": write(tmp_path / "a.jsonl", sums(20)), "max_rows": 5, "shuffle": shuffle}
    first, again = (prompts(epoch(sources(args).train)) for _ in range(2))
    everything = prompts(epoch(sources({**args, "max_rows": 99}).train))
    assert (len(set(first)), len(everything)) == (5, 20)
    assert first == again
    assert set(first) <= set(everything)
    assert (first == everything[:5]) is not shuffle


@pytest.mark.parametrize(("holdout", "count"), [(5, 5), (0.1, 2), (0.001, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_held_out_rows_are_never_trained(tmp_path: Path, holdout: float, count: int, seed: int) -> None:
    args = {"file_name": write(tmp_path / "a.jsonl", sums(20)), "holdout": holdout}
    made = sources(args, seed=seed)
    train, held_out = prompts(epoch(made.train)), prompts(epoch(made.validation))
    assert len(held_out) == count
    assert sorted(train + held_out) == sorted(prompts(epoch(sources({**args, "holdout": None}).train)))
    assert made.validation is not None
    assert made.validation.task(count) is None
    assert prompts(epoch(sources(args, seed=seed).validation)) == held_out


def test_twins_of_held_out_rows_are_not_trained_either(tmp_path: Path) -> None:
    made = sources({"file_name": write(tmp_path / "a.jsonl", sums(10) * 2), "holdout": 4})
    train, held_out = set(prompts(epoch(made.train))), set(prompts(epoch(made.validation)))
    assert not train & held_out
    assert len(train | held_out) == 10
    (note,) = made.notes
    assert f"{20 - 4 - len(epoch(made.train))} rows have the prompt of a held-out one" in note


def test_validation_has_data_of_its_own_read_like_those_of_training(tmp_path: Path) -> None:
    rows = [{"q": f"{n}", "a": f"{n}"} for n in range(6)]
    write(tmp_path / "train.jsonl", rows[:4])
    write(tmp_path / "test.jsonl", rows[3:])
    args = {"file_name": "train.jsonl", "dataset_dir": str(tmp_path), "prompt": "q", "answer": "a", "system": "S"}
    made = sources(args, {"file_name": "test.jsonl", "system": "T", "shuffle": False})
    assert [task.data["a"] for task in epoch(made.validation)] == ["3", "4", "5"]
    assert "".join(map(chr, epoch(made.validation)[0].prompt)) == "<s>T<u>3<a>"
    assert made.notes == ("validation.data_args: 1 of 3 prompts are also trained on",)


@pytest.mark.parametrize(
    ("args", "validation", "said"),
    [
        ({"holdout": 20}, {}, "20 rows − 20 held out and their twins leave none"),
        ({"holdout": 30}, {}, "leave none"),
        ({"holdout": 1.5}, {}, "neither a number of rows nor a share"),
        ({"holdout": 2}, {"file_name": "addition"}, "holdout = 2.0: validation has data of its own: addition"),
        ({}, {"holdout": 2}, r"validation\.data_args\.holdout = 2: unknown key"),
        ({}, {"file_name": "nowhere.jsonl"}, r"validation\.data_args\.file_name = 'nowhere\.jsonl': there is no"),
    ],
)
def test_held_out_data_that_cannot_be_are_refused(
    tmp_path: Path, args: dict[str, Any], validation: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        sources({"file_name": write(tmp_path / "a.jsonl", sums(20)), **args}, validation)


@pytest.mark.parametrize(
    ("row", "rewards", "domain"),
    [
        ({"domain": "code"}, {}, "code"),
        ({"tag": "aime"}, {}, "aime"),
        ({"domain": "code", "tag": "aime"}, {"code": {}}, "code"),
        ({"domain": None}, {"math": {}}, "math"),
        ({}, {}, "default"),
        ({}, {"math": {}}, "math"),
        ({}, {"math": {"tag_included": ["x"]}, "form": {"tag_included": ["x"]}}, "x"),
        ({}, {"sums": {}, "other": {}}, "sums"),
        ({}, {"default": {}, "other": {}}, "default"),
        ({}, {"math": {}, "overlong": {"tag_included": ["*"]}}, "math"),
        ({}, {"math": {"tag_included": ["*"]}, "form": {"tag_included": ["*"]}}, "default"),
        ({"domain": "code"}, {"math": {"tag_included": ["*"]}}, "code"),
        ({"tag": "aime"}, {"math": {"tag_included": ["aime"]}, "other": {}}, "aime"),
    ],
)
def test_rows_go_to_the_domain_that_they_or_their_file_name(
    tmp_path: Path, row: dict[str, Any], rewards: dict[str, Any], domain: str
) -> None:
    name = write(tmp_path / "sums.jsonl", [{**sums(1)[0], **row}])
    (task,) = epoch(sources({"file_name": name}, rewards=rewards).train)
    assert task.domain == domain


@pytest.mark.parametrize(("row", "said"), [({}, "'default'"), ({"domain": "code"}, "'code'")])
def test_a_domain_that_no_reward_judges_is_refused(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    name = write(tmp_path / "a.jsonl", [{**sums(1)[0], **row}])
    with pytest.raises(ConfigError, match=f"no reward judges the domain {said} of .*only: form, math .*tag_included"):
        sources({"file_name": name}, rewards={"math": {}, "form": {}})


def test_domains_are_mixed_in_the_shares_that_were_asked_for(tmp_path: Path) -> None:
    names = [write(tmp_path / f"{name}.jsonl", sums(count)) for name, count in (("a", 3), ("b", 50), ("c", 5))]
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    source = sources({"file_name": names, "domain_interleave_probs": shares}).train
    given = [source.task(position) for position in range(2000)]
    tasks = [task for task in given if task is not None]
    for start in range(0, 1990, 10):
        found = [task.domain for task in tasks[start : start + 10]]
        assert all(abs(found.count(name) - 10 * share) <= 1 for name, share in shares.items())
    of_b = [task.data["prompt"] for task in tasks if task.domain == "b"]
    assert all(len(set(of_b[start : start + 50])) == 50 for start in range(0, 550, 50))
    assert [task.position for task in tasks] == list(range(2000))
    assert source.task(1234) == sources({"file_name": names, "domain_interleave_probs": shares}).train.task(1234)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"a": 1.0}, "no share for the domain 'b'"),
        ({"a": 0.5, "b": 0.4}, "shares add up to 0.9, not to 1"),
        ({"a": 0.5, "b": 0.25, "c": 0.25}, "the data has no domain 'c'"),
        ({"a": 0.9995, "b": 0.0005}, "the share of 'b' is below"),
    ],
)
def test_shares_that_do_not_fit_the_data_are_refused(tmp_path: Path, shares: dict[str, float], said: str) -> None:
    names = [write(tmp_path / f"{name}.jsonl", [{**sums(1)[0], "domain": name}]) for name in "ab"]
    with pytest.raises(ConfigError, match=said):
        sources({"file_name": names, "domain_interleave_probs": shares})


def test_a_fingerprint_tells_other_data_other_prompts_and_another_order(tmp_path: Path) -> None:
    args: dict[str, Any] = {"file_name": write(tmp_path / "a.jsonl", sums(5)), "holdout": 1}
    changed = write(tmp_path / "b.jsonl", [*sums(4), {"prompt": "4+1", "answer": "6"}])
    made = sources(args)
    assert made.train.fingerprint() == sources(args).train.fingerprint()
    others = [
        made.validation,
        sources({**args, "file_name": changed}).train,
        sources({**args, "system": "S"}).train,
        sources({**args, "holdout": 2}).train,
        sources({**args, "shuffle": False}).train,
        sources(args, seed=7).train,
        sources({**args, "holdout": None, "domain_interleave_probs": {"a": 1.0}}).train,
    ]
    found = [other.fingerprint() for other in others if other is not None]
    assert len({made.train.fingerprint(), *found}) == len(others) + 1


def test_a_note_says_how_many_rows_lack_an_answer_and_what_json_cannot_hold(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "a", "answer": None, "day": date(2024, 2, 29), "image": b"\xff"}, {"prompt": "b", "answer": "1"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    made = sources({"file_name": str(tmp_path / "a.parquet"), "shuffle": False})
    task = epoch(made.train)[0]
    assert task.data == {"prompt": "a", "answer": None, "day": "2024-02-29", "image": None}
    assert made.notes == (
        "actor_train.data_args: values of type bytes are null in the tasks' data, which is JSON",
        f"{tmp_path / 'a.parquet'}: 1 of 2 rows have no 'answer'",
    )


def test_a_table_holds_a_short_row_in_less_than_two_hundred_bytes() -> None:
    table = TaskTable()
    row = {"prompt": "What is 12 + 34? Answer with the number.", "answer": "46"}
    for _ in range(1000):
        table.add(row, domain="math", identity=7, prompt=(), tokenize=lambda data: [len(data)])
    assert table.nbytes() < 200 * len(table)
    assert table[999] == Task(position=999, domain="math", prompt=(2,), data=row)
