"""Mutated files and command lines are accepted or refused, never with a traceback, never slowly; see `make fuzz`."""

import random
from pathlib import Path

from benchmarks.fuzz_configs import describe, fuzz_part, list_specimens, mutate_text, mutate_words, run_quietly


def test_a_sample_of_mutations_is_accepted_or_refused() -> None:
    result = fuzz_part(range(7_000, 7_120))
    assert not result.findings, "\n".join(describe(result))
    assert result.outcomes["refused"] > result.outcomes["accepted"] > 0


def test_a_mutation_changes_what_it_is_given() -> None:
    text = next(one.path for one in list_specimens() if one.path is not None).read_text(encoding="utf-8")
    changed = [mutate_text(text, random.Random(seed)) for seed in range(20)]
    assert sum(one != text.encode() for one in changed) > 15
    words = ["seed=1", "max_steps=2", "pretrain=x"]
    assert sum(mutate_words(words, random.Random(seed)) != words for seed in range(20)) > 15


def test_a_refusal_without_a_message_and_a_traceback_are_found(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("max_steps: 3\n", encoding="utf-8")
    bad.write_text("max_steps: three\n", encoding="utf-8")
    assert run_quietly(["config", "check", str(good)])[0] == "accepted"
    assert run_quietly(["config", "check", str(bad)])[0] == "refused"
    assert run_quietly(["config", "check", 3])[0] == "traceback"  # type: ignore[list-item]
