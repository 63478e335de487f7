"""The report page: whatever state a run is in it has a page, which stands alone and shows what happened."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from headway.errors import HeadwayError
from headway.monitor.event_log import LoggedEvent, encode_event
from headway.monitor.report_charts import CHARTS, make_chart_columns
from headway.monitor.report_page import (
    describe_segments,
    list_facts,
    make_report_page_data,
    render_report_page,
)
from headway.monitor.run_record import make_run_record, read_run_record
from headway.monitor.sample_excerpts import ImageLog, select_answers, select_images
from headway.monitor.scalar_series import ScalarPoint
from tests.monitor.factory import NASTY, ev, resumed_run, toy_run, training_run
from tests.monitor.test_timeline_page import embedded


def written(directory: Path, events: list[LoggedEvent], config: str = "", samples: str = "") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "events.jsonl").write_text("".join(encode_event(event) + "\n" for event in events), encoding="utf-8")
    for name, text in (("config.yaml", config), ("samples.jsonl", samples)):
        if text:
            (directory / name).write_text(text, encoding="utf-8")
    return directory


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(8)).decode()


def drawing(step: int, prompt: str, png: str = PNG, reward: object = 0.5) -> str:
    return json.dumps({"step": step, "prompt": prompt, "reward": reward, "png": png}) + "\n"


def test_pictures_of_the_same_prompt_stand_side_by_side_first_and_last(tmp_path: Path) -> None:
    run = written(tmp_path, training_run(steps=3))
    log = ImageLog(run / "images.jsonl", prompts=2)
    for step, reward in ((0, 0.2), (5, 0.4), (10, 0.9)):
        log(step, [("4711", PNG, reward), (NASTY, PNG, None), ("beyond the first few", PNG, 1.0)])
    with (run / "images.jsonl").open("a", encoding="utf-8") as lines:
        lines.write("{torn\n" + drawing(3, "4711", "no PNG") + drawing(3, "x", base64.b64encode(b"GIF89a").decode()))
    page = render_report_page(run)
    ((first, last), (nasty, _)) = embedded(page)["runs"][0]["pictures"]["pairs"]
    assert (first["step"], first["reward"], last["step"], last["reward"]) == (0, 0.2, 10, 0.9)
    assert first["png"] == PNG and nasty["prompt"] == NASTY and nasty["reward"] is None
    assert "img-src data:" in page


def test_a_step_that_was_drawn_again_counts_as_it_became() -> None:
    lines = [drawing(0, "a", reward=0.1), drawing(5, "a", reward=0.2), drawing(5, "a", reward=0.3)]
    ((first, last),) = select_images(lines)
    assert (first.reward, last.reward) == (0.1, 0.3)


def sample(step: int, prompt: object = "p", answer: object = "a", reward: object = 1.0) -> str:
    return json.dumps({"prompt": prompt, "answer": answer, "reward": reward, "step": step}) + "\n"


CONFIG = """
pretrain: tiny-model
async_generation_ratio: 1.0
rollout_batch_size: 8
actor_train: {training_args: {learning_rate: 1.0e-5}, data_args: {file_name: [sums.jsonl]}}
"""


def test_a_finished_run_shows_what_ran_and_what_came_of_it(tmp_path: Path) -> None:
    run = written(
        tmp_path / "one", training_run(steps=10), CONFIG, sample(0, answer="early") + sample(9, answer="late")
    )
    data = embedded(render_report_page(run))
    (shown,) = data["runs"]
    assert (shown["name"], shown["state"]) == ("one", ["done", "finished"])
    facts = dict(shown["facts"])
    assert facts["model"] == "tiny-model" and facts["data"] == "sums.jsonl" and facts["α"] == "1, wait"
    assert facts["batch"] == "8 groups of 1" and facts["learning rate"] == "1e-05" and facts["machine"] == "2 cores"
    assert shown["rows"][0][:2] == ["held-out reward", "0.100 → 0.550"]
    assert shown["steps"]["step"] == list(range(1, 11))
    assert shown["held_out"]["step"] == [0, 5, 10]
    assert [answer["answer"] for answer in shown["answers"]["pairs"][0]] == ["early", "late"]
    assert "Lag of trained samples" in shown["tables"]


def test_every_curve_of_a_chart_is_one_that_is_measured(tmp_path: Path) -> None:
    outcome = {"success": 1.0, "turns": 4.0, "invalid": 1.0}
    events = [
        ev(event.time_s, event.kind, event.who, **event.data, **outcome) if event.kind == "sample.finish" else event
        for event in training_run(steps=6)
    ]
    families = [name for chart in CHARTS for name, _ in chart.curves if name.startswith(("memory/", "gpu_"))]
    usage = {f"{name}0" if name.endswith("/") else name: 2.0 for name in families}
    events.insert(1, ev(events[1].time_s, "usage", "machine", values=usage))
    series = embedded(render_report_page(written(tmp_path, events)))["runs"][0]["steps"]["series"]
    measured = {name for chart in CHARTS for name, _ in chart.curves if not name.startswith(("train/", "drops/"))}
    assert all(any(known.startswith(name) for known in series) for name in measured)
    assert {"train/entropy", "train/grad_norm", "drops/zero_variance"} <= series.keys()


def test_lost_steps_count_once_with_what_they_became() -> None:
    record = make_run_record(resumed_run(first=12, back_to=10, then=8))
    assert list(record.curves.steps) == list(range(1, 19))
    assert record.curves.steps[11].time_s > record.segments[1].begun_s
    assert dict(list_facts(record.config, record.segments))["resumed"] == "1 ×"
    assert describe_segments(record.segments, is_alive=record.is_alive) == ("done", "finished")


def test_nothing_that_a_killed_process_had_open_stays_open() -> None:
    events = [
        ev(0, "run.begin", "run", resumed=False, trained=0),
        ev(1, "request.start", "engine/0", request="a"),
        ev(2, "group.train", "train", group=1, trained=0, oldest=0, in_flight=0, in_queue=0, samples=4, actions=8),
        ev(2, "run.begin", "run", resumed=True, trained=0),
        ev(10, "group.train", "train", group=1, trained=0, oldest=0, in_flight=0, in_queue=0, samples=4, actions=8),
        ev(12, "step.end", "train", trained=1, groups=1),
    ]
    record = make_run_record(events)
    assert record.lanes.engines["engine/0"] == [(1, 1), (2, 0)]
    assert record.report.usage.engines[0].busy == pytest.approx(1 / 12)
    (only,) = record.report.throughput.steps
    assert (only.samples, only.seconds) == (4, 10)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"trained": 3, "finished": True}, ("done", "finished")),
        ({"trained": 3, "reason": ""}, ("done", "finished")),
        ({"trained": 3, "reason": "asked to stop"}, ("stopped", "ended early: asked to stop")),
        (None, ("silent", "ended without a word, perhaps killed")),
    ],
)
def test_how_a_run_stands_is_said(end: dict | None, state: tuple[str, str]) -> None:
    events = training_run(steps=3, finished=False)
    if end is not None:
        events.append(ev(99, "run.end", "run", **end))
    assert describe_segments(make_run_record(events).segments, is_alive=False) == state


def test_a_log_that_was_just_written_to_is_of_a_run_that_goes_on(tmp_path: Path) -> None:
    run = written(tmp_path, training_run(steps=3, finished=False)[:30])
    with (run / "events.jsonl").open("a", encoding="utf-8") as log:
        log.write('[12,"step.e')
    record = read_run_record(run)
    assert describe_segments(record.segments, is_alive=record.is_alive) == ("going", "still running")
    assert embedded(render_report_page(run))["runs"][0]["steps"]["step"] == []


def test_a_simulated_run_and_an_empty_log_have_a_page(tmp_path: Path) -> None:
    for name, events in (("simulated", toy_run(steps=3)), ("empty", [])):
        data = embedded(render_report_page(written(tmp_path / name, events) / "events.jsonl"))
        assert data["runs"][0]["state"] == ["", ""]
        assert data["runs"][0]["name"] == name


def test_a_directory_without_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no run to report on"):
        render_report_page(tmp_path)


def test_a_configuration_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=re.escape("config.yaml: cannot be read")):
        read_run_record(written(tmp_path, [], config="a: [b"))


def test_several_runs_are_laid_over_each_other_with_what_differs(tmp_path: Path) -> None:
    one = written(tmp_path / "a" / "run", training_run(steps=4), CONFIG)
    two = written(tmp_path / "b" / "run", training_run(steps=4, seed=1), "pretrain: tiny-model\nseed: 7\n")
    data = embedded(render_report_page(one, compare=[two]))
    assert [run["name"] for run in data["runs"]] == ["run (1)", "run (2)"]
    differences = dict(data["differences"])
    assert differences["seed"] == ["42", "7"]
    assert differences["async_generation_ratio"] == ["1.0", "0.0"]
    assert "pretrain" not in differences


def test_the_page_stands_alone_and_nothing_leaves_its_data_block(tmp_path: Path) -> None:
    events = training_run(steps=4)
    events.append(ev(99, "error", NASTY, error="E", message=NASTY))
    run = written(tmp_path / "x", events, json.dumps({"pretrain": NASTY}), sample(1, NASTY, NASTY))
    page = render_report_page(run)
    assert page.count("</script>") == 2 and "<img" not in page
    data = embedded(page)
    assert NASTY in data["runs"][0]["faults"][-1][3]
    assert dict(data["runs"][0]["facts"])["model"] == NASTY
    assert data["timeline"].startswith("<!doctype html>")
    outside = page.replace("\\u003c", "").replace("src=x onerror", "")
    assert not re.search(r"https?:|\bsrc=|@import|url\(", outside)
    assert "default-src 'none'" in page


def test_a_long_run_is_averaged_and_keeps_its_maxima() -> None:
    points = [ScalarPoint(n, float(n), {"lag/max": n % 100, "reward/train": float(n % 2)}) for n in range(10_000)]
    columns = make_chart_columns(points)
    assert len(columns["step"]) <= 1500 and columns["step"][-1] == 9999
    assert max(columns["series"]["lag/max"]) == 99
    assert sum(columns["series"]["reward/train"]) / len(columns["step"]) == pytest.approx(0.5, abs=0.01)


def test_answers_to_the_same_prompt_come_as_pairs() -> None:
    lines = [sample(0, "p", "no"), sample(0, "q", "once"), sample(5, "p", "hm"), sample(9, "p", "yes"), "{torn"]
    (pair,) = select_answers(lines).pairs
    assert [answer.answer for answer in pair] == ["no", "yes"]


def test_without_a_prompt_answered_twice_the_first_and_the_last_are_shown() -> None:
    found = select_answers(sample(n, f"p{n}", "x" * 10_000) for n in range(40))
    assert [one.step for one in found.early] == [0, 1, 2, 3]
    assert [one.step for one in found.late] == [36, 37, 38, 39]
    assert len(found.late[0].answer) < 3000


def test_conversations_and_missing_rewards_are_shown_as_they_are() -> None:
    turns = [{"role": "user", "content": "2+2?"}]
    (one,) = select_answers([sample(1, turns, "4", None), '{"prompt": "no answer"}', "[]", "3"]).early
    assert (one.prompt, one.reward) == ("user: 2+2?", None)


def test_two_pages_of_one_log_are_the_same_text() -> None:
    first, second = (json.dumps(make_report_page_data([make_run_record(training_run(steps=5))])) for _ in range(2))
    assert first == second
