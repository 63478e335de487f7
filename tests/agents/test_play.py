"""`headway play` by hand."""

from __future__ import annotations

import io

import pytest

from headway.cli import main

WORLDS = "tests.environments.sample_environments"


def play(monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main(["play", *words])


def test_an_environment_is_stepped_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(monkeypatch, "x\n1\n3\nunread\n", f"{WORLDS}:Guess", "most=5", "--seed", "9") == 0
    assert capsys.readouterr().out.splitlines() == [
        "Guess a digit.",
        "",
        "Episode 1: a digit up to 5?",
        "> A digit!",
        "[reward 0, not understood]",
        "> No.",
        "[reward 0]",
        "> Right.",
        "[reward 1, success, over]",
        "earned 1",
    ]
    assert play(monkeypatch, "1\n", f"{WORLDS}:Guess", "base=0.5") == 0
    assert capsys.readouterr().out.endswith("> earned 0\n"), "the end of the input ends it"


def test_a_failing_one_and_a_wrong_one_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "go\n", f"{WORLDS}:Bad", "what=nonsense") == 1
    assert "the episode failed: step returned {'observation': 3}" in capsys.readouterr().err
    assert play(monkeypatch, "go\n", f"{WORLDS}:Bad", "what=raises") == 1
    assert "the episode failed: ValueError: a bad day" in capsys.readouterr().err
    for words, problem in (
        ([f"{WORLDS}:Guess", "mst=3"], "did you mean 'most'"),
        ([f"{WORLDS}:Guess", "a.b=3"], "is no option"),
        (["gess"], "is no environment"),
    ):
        assert play(monkeypatch, "", *words) == 2
        assert problem in capsys.readouterr().err
    assert main(["play"]) == 0
    assert "frozen_lake\n" in capsys.readouterr().out


def test_episodes_and_their_length_are_as_many_as_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("frozen_lake", "is_slippery=false", "--episodes", "2")
    assert play(monkeypatch, "Up\n" * 9, *words, "max_steps=3") == 0
    said = capsys.readouterr().out
    assert said.count("[reward ") == 6 and said.count("[cut off: an episode has at most 3 turns]") == 2
    assert play(monkeypatch, "Up\n" * 9, *words, "--max-steps", "2") == 0
    assert capsys.readouterr().out.count("[reward ") == 4
