"""Numbers that can be trusted: verdicts that failed make no score, and a run that goes on says what changed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runs.factory import Runs, events

_REWARDS = """
def some(text, row):
    if int(row["answer"]) % 2:
        raise ValueError("odd answers are beyond me")
    return float(len(text))

def none(text, row):
    return row["absent"]
"""


def test_failed_verdicts_make_no_score_and_another_reward_is_refused(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text(_REWARDS)
    reward = {"rewards.arithmetic.reward_fn": f"{file}:some", "actor_train.data_args.options": "{size: 40}"}
    run = runs.train(tmp_path / "run", max_steps=2, eval_steps=2, **reward)
    assert run.end() == 0, run.text
    first, last = (event.data for event in events(run.directory, "validate.end"))
    for score in (first, last):
        assert score["samples"] > 0 and score["failed"] > 0 and "odd answers are beyond me" in score["fault"]
    left_out = f"{last['failed']} of {last['samples'] + last['failed']} answers without a verdict left out"
    assert f"({last['samples']}; {left_out}: " in run.text

    out = tmp_path / "answers.jsonl"
    judged = runs.start(tmp_path / "eval", "eval", str(run.directory), "--json", "--out", str(out), "processes=false")
    assert judged.end() == 1
    assert f"{last['failed']} of {last['samples'] + last['failed']} answers have no verdict" in judged.text
    assert f"{last['failed']} × rewards.arithmetic: " in judged.text and "odd answers are beyond me" in judged.text
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    given = [row["reward"] for row in rows if row["reward"] is not None]
    result = json.loads(judged.text[judged.text.index("{") : judged.text.rindex("}") + 1])["domains"]["addition"]
    assert (result["answers"], result["failed"]) == (last["samples"], last["failed"])
    assert abs(result["reward"] - sum(given) / len(given)) < 1e-9
    nothing = f"rewards.arithmetic.reward_fn={file}:none"
    hopeless = runs.start(tmp_path / "none", "eval", str(run.directory), nothing, "--limit", "3", "processes=false")
    assert hopeless.end() == 1 and "KeyError: 'absent'" in hopeless.text and "0.000" not in hopeless.text

    more = ("train", str(run.directory), "max_steps=3", "pg_variant=cispo")
    refused = runs.start(run.directory, *more, nothing)
    assert refused.end() == 2 and f"it was {file}:some in the run" in refused.text
    assert "accept_changed_reward=true" in refused.text
    numeric = "rewards.arithmetic.reward_fn=numeric"
    accepted = runs.start(run.directory, *more, numeric, "accept_changed_reward=true")
    assert accepted.end() == 0, accepted.text
    told = accepted.text[: accepted.text.index("] step 3")]
    assert "changed since the last start: pg_variant: " in told and " → cispo\n" in told
    assert f"changed since the last start: rewards.arithmetic.reward_fn: {file}:some → numeric" in told
