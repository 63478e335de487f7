"""Going on: with more steps, from a damaged checkpoint, from another run; and judging what came out."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runs.factory import Runs, audit, events, rows


def test_a_damaged_checkpoint_is_passed_over_and_the_steps_behind_it_are_made_again(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", max_steps=4)
    assert run.end() == 0, run.text
    newest = run.directory / "checkpoints" / "step-00000004" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:2000])
    again = runs.train(run.directory, max_steps=5)
    assert again.end() == 0, again.text
    assert "the checkpoint of step 4 cannot be read and is passed over" in again.text
    assert [event.data["trained"] for event in events(run.directory, "step.end")] == [1, 2, 3, 4, 3, 4, 5]
    trained = rows(run.directory, "SELECT trained_at, count(*) FROM samples WHERE end = 'trained' GROUP BY 1")
    assert trained == [(step, 4) for step in range(1, 6)]
    lost = rows(run.directory, "SELECT DISTINCT reason FROM samples WHERE end = 'dropped'")
    assert ("lost_lineage",) in lost, "payloads of a checkpoint are pruned, so they are drawn again"
    audit(run.directory)

    for weights in (run.directory / "checkpoints").glob("*/model.safetensors"):
        weights.write_bytes(b"")
    hopeless = runs.train(run.directory, max_steps=6)
    assert hopeless.end() == 1
    assert "none of its checkpoints can be read; the newest: " in hopeless.text and "step-00000005" in hopeless.text
    assert "Traceback" not in hopeless.text
    audit(run.directory)


def test_a_finished_run_says_so_and_goes_on_when_it_is_given_more_steps(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", max_steps=2)
    assert run.end() == 0, run.text
    same = runs.train(run.directory, max_steps=2)
    assert same.end() == 0 and "is finished: 2 steps. Raise max_steps" in same.text
    more = runs.start(run.directory, "train", str(run.directory), "max_steps=3", "--resume")
    assert more.end() == 0, more.text
    assert [event.data["trained"] for event in events(run.directory, "step.end")] == [1, 2, 3]

    other = runs.train(run.directory, max_steps=4, num_return_sequences_in_group=4, rollout_batch_size=1)
    assert other.end() == 2
    assert "num_return_sequences_in_group = 4" in other.text and "was begun with 2" in other.text
    assert runs.template.call("tests.runs.factory:make_model", str(tmp_path / "other")) == 0
    another = runs.start(run.directory, "train", str(run.directory), "max_steps=4", f"pretrain={tmp_path / 'other'}")
    assert another.end() == 2
    assert "was begun with" in another.text and str(runs.model) in another.text
    never = runs.train(run.directory, max_steps=4, resume="never")
    assert never.end() == 2 and "resume is never" in never.text
    nothing = runs.train(tmp_path / "nothing", "--resume")
    assert nothing.end() == 2 and "there is no run to go on with" in nothing.text


def test_a_new_run_begins_with_a_checkpoint_of_another_and_keeps_its_own_elsewhere(runs: Runs, tmp_path: Path) -> None:
    first = runs.train(tmp_path / "first", max_steps=2, track_with="[jsonl]")
    assert first.end() == 0, first.text
    metrics = [json.loads(line) for line in (first.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "reward/train" in row] == [1, 2]
    checkpoint = first.directory / "checkpoints" / "step-00000002"
    second = runs.train(tmp_path / "second", max_steps=4, resume=checkpoint, checkpoint_dir=tmp_path / "kept")
    assert second.end() == 0, second.text
    assert [event.data["trained"] for event in events(second.directory, "step.end")] == [3, 4]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-00000004"]
    assert not (second.directory / "checkpoints").exists()
    audit(second.directory)
    assert runs.template.call("tests.runs.factory:check_checkpoint", str(tmp_path / "kept" / "step-00000004")) == 0
    more = runs.start(second.directory, "train", str(second.directory), "max_steps=5")
    assert more.end() == 0, more.text
    assert (tmp_path / "kept" / "step-00000005").exists()


def test_eval_judges_the_newest_checkpoint_or_the_model_that_is_named(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", max_steps=2, **{"validation.data_args.file_name": "addition"})
    assert run.end() == 0, run.text
    out = tmp_path / "answers.jsonl"
    options = ("--answers", "4", "--limit", "3", "--json", "--out", str(out))
    judged = runs.start(tmp_path / "eval", "eval", str(run.directory), *options)
    assert judged.end() == 0, judged.text
    result = json.loads(judged.text[judged.text.index("{") :])
    assert result["policy"] == str(run.directory / "checkpoints" / "step-00000002")
    assert result["answers"] == 4 and result["domains"]["addition"]["tasks"] == 3
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    logged = json.loads((run.directory / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert len(answers) == 12 and answers[0].keys() - {"task"} == logged.keys() - {"step", "kind"}

    model = f"pretrain={runs.model}"
    for words in ([str(run.directory), model], runs.words(tmp_path / "unused", processes=True)):
        named = runs.start(tmp_path / "named", "eval", *words, "--limit", "2")
        assert named.end() == 0, named.text
        assert f"policy {runs.model}\n" in named.text
    assert not (tmp_path / "unused").exists()
    unwritable = runs.start(tmp_path / "bad", "eval", str(run.directory), "--out", "/proc/nothing/here")
    assert unwritable.end() == 2 and "--out = '/proc/nothing/here': cannot be written" in unwritable.text
    absent = runs.start(tmp_path / "absent", "eval", str(tmp_path / "absent"))
    assert absent.end() == 2 and "Traceback" not in absent.text
