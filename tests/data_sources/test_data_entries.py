"""What an entry of `file_name` means, and what is said of one that means nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from tests.data_sources.factory import epoch, sources, sums, text_of, write


def answers(data_args: dict[str, Any]) -> list[str]:
    return [task.data["answer"] for task in epoch(sources({"shuffle": False, **data_args}).train)]


def test_every_kind_of_file_gives_the_same_tasks(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [*sums(3), {"prompt": 'a "b", c\nd', "answer": "é"}]
    write(tmp_path / "one.jsonl", rows)
    (tmp_path / "two.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "three.json").write_text((tmp_path / "one.jsonl").read_text())
    (tmp_path / "four.csv").write_text('prompt,answer\n0+1,1\n1+1,2\n2+1,3\n"a ""b"", c\nd",é\n', encoding="utf-8-sig")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "five.parquet")
    made = {
        name: epoch(sources({"file_name": name, "dataset_dir": str(tmp_path), "shuffle": False}).train)
        for name in ("one.jsonl", "two.json", "three.json", "four.csv", "five.parquet")
    }
    assert len(made["one.jsonl"]) == 4
    assert all(tasks == made["one.jsonl"] for tasks in made.values())
    assert text_of(made["four.csv"][3]) == '<u>a "b", c\nd<a>'


def test_names_start_from_the_data_folder_or_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a.jsonl", sums(2))
    monkeypatch.chdir(tmp_path)
    assert answers({"file_name": "data/a.jsonl"}) == ["1", "2"]
    assert answers({"file_name": "a.jsonl", "dataset_dir": "data"}) == ["1", "2"]
    assert answers({"file_name": [str(tmp_path / "data" / "a.jsonl"), "a.jsonl"], "dataset_dir": "data"}) == [
        "1",
        "2",
        "1",
        "2",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gsm8k_trian.jsonl", r"no such file in /.*did you mean 'gsm8k_train\.jsonl'\?.*dataset_dir"),
        ("nowhere/a.jsonl", "there is no folder /.*nowhere"),
        ("arithmetics", "did you mean 'arithmetic'"),
        ("gsm8k_train", r"did you mean 'gsm8k_train\.jsonl'"),
        ("reasoning_gym/chain_sum", "did you mean 'reasoning_gym:chain_sum'"),
        ("reasoning_gim:chain_sum", "did you mean 'reasoning_gym:chain_sum'"),
        ("folder", "is a folder, did you mean 'hf:folder'"),
        ("qwertz", r"is no data \(a \.jsonl, .* file, hf:name, reasoning_gym:name, addition, arithmetic or strings\)"),
        ([], "names no data"),
    ],
)
def test_an_entry_that_means_nothing_is_refused_with_what_was_meant(tmp_path: Path, name: Any, said: str) -> None:
    write(tmp_path / "gsm8k_train.jsonl", sums(1))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"actor_train\.data_args\.file_name = .*" + said):
        sources({"file_name": name, "dataset_dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"prompt": "a", "answer": 1}\n\n{"prompt": \n', r"a\.jsonl:3: not JSON"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: list instead of an object"),
        ("a.jsonl", "\n \n", r"file_name = '.*a\.jsonl': has no rows"),
        ("a.jsonl", '{"question": "b", "answer": 1}\n', r"a\.jsonl:1: no column 'prompt' \(.*question, answer"),
        ("a.jsonl", '{"prompt": "", "answer": 1}\n', r"a\.jsonl:1: the prompt is empty"),
        ("a.jsonl", '{"prompt": 3, "answer": 1}\n', r"a\.jsonl:1: the prompt 3 is neither"),
        ("a.jsonl", '{"prompt": [{"role": "user"}], "answer": 1}\n', r"a\.jsonl:1: the prompt .* is neither"),
        ("a.jsonl", '{"prompt": [{"role": "stranger", "content": "a"}]}\n', r"a\.jsonl:1: .*template fails: unknown"),
        ("a.jsonl", '{"prompt": "a", "domain": 3}\n', r"a\.jsonl:1: domain 3 is not a text"),
        ("a.jsonl", '{"prompt": "a", "gold": 3}\n', r"answer = 'answer': no row of .*a\.jsonl has it .*prompt, gold"),
        ("a.json", '[{"prompt": "a"}, 3]', r"a\.json, item 2: int instead"),
        ("a.json", '[{"prompt": "a"}', r"a\.json: not JSON"),
        ("a.csv", "prompt,answer\na,b\na,b,c\n", r"a\.csv:3: 3 cells instead of 2"),
        ("a.csv", "prompt,prompt\n", r"a\.csv:1: two columns"),
        ("a.parquet", "no", "is no Parquet file"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        sources({"file_name": name, "dataset_dir": str(tmp_path)})


def test_options_are_for_entries_that_are_not_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", sums(1))
    with pytest.raises(ConfigError, match="files take no options"):
        sources({"file_name": "a.jsonl", "dataset_dir": str(tmp_path), "options": {"size": 3}})
    both = {"file_name": ["addition", "arithmetic"], "holdout": 0}
    made = epoch(sources({**both, "options": {"size": 40, "arithmetic": {"size": 70}}}).train)
    assert len(made) == 110
    with pytest.raises(ConfigError, match=r"options\.arithmetic = 3: is not a mapping"):
        sources({**both, "options": {"arithmetic": 3}})


def test_a_file_of_lines_has_a_prompt_in_each_and_its_answer_in_quotation_marks(tmp_path: Path) -> None:
    (tmp_path / "signs.txt").write_text('A sign that says "OPEN"\n\n1234\nan open "quote\n', encoding="utf-8")
    made = epoch(sources({"file_name": "signs.txt", "dataset_dir": str(tmp_path), "shuffle": False}).train)
    assert [task.data["answer"] for task in made] == ["OPEN", "1234", 'an open "quote']
    assert text_of(made[0]) == '<u>A sign that says "OPEN"<a>'


def test_shares_by_reward_count_the_rows_of_its_tags(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "answer": "1", "tag": tag} for n, tag in enumerate(["aime", "deepmath", "kod"] * 4)]
    write(tmp_path / "rows.jsonl", rows)
    data_args = {"file_name": "rows.jsonl", "dataset_dir": str(tmp_path)}
    rewards = {"math": {"tag_included": ["aime", "deepmath"]}, "code": {"tag_included": ["kod"]}}

    def domains(**more: Any) -> set[str]:
        return {task.domain for task in epoch(sources({**data_args, **more}, rewards=rewards).train)}

    assert domains(domain_interleave_probs={"math": 0.5, "code": 0.5}) == {"math", "code"}
    assert domains() == {"aime", "deepmath", "kod"}
