"""`headway plan`: the ranking as text and as JSON."""

from __future__ import annotations

import json

import pytest

from headway.cli import main
from tests.cli.factory import TINY


def test_it_prints_a_ranking_with_the_synchronous_run_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY, "--gpus", "4", "--alpha", "0,1", "--top", "1"]) == 0
    printed = capsys.readouterr().out
    for expected in ("s/step", "gain", "tokens/s", "length", "drop", "train", "sync 4", "1.00×"):
        assert expected in printed


def test_json_gives_the_options_that_train_most_tokens_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY, "--gpus", "4", "--alpha", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    speeds = [option["tokens_per_s"] for option in plan["options"]]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == plan["simulated"]
    assert plan["synchronous"]["colocated"] and plan["synchronous"]["train_gpus"] == 4
    assert plan["verdict"]


@pytest.mark.parametrize(("option", "value"), [("--gpus", "0"), ("--alpha", "-1"), ("--top", "0")])
def test_numbers_that_make_no_sense_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--gpus": "4", option: value}
    assert main(["plan", *TINY, *(f"{name}={given}" for name, given in options.items())]) == 2
    assert option in capsys.readouterr().err
