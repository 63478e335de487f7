"""The end of a run in a handful of rows."""

from __future__ import annotations

import io

from rich.console import Console

from headway.monitor.event_log import LoggedEvent
from headway.monitor.report_tables import make_summary_rows, print_training_summary
from headway.monitor.run_report import make_run_report
from tests.monitor.factory import ev, resumed_run, training_run


def rows(events: list[LoggedEvent]) -> dict[str, tuple[str, str]]:
    return {name: (value, note) for name, value, note in make_summary_rows(make_run_report(events))}


def test_a_run_is_told_in_nine_rows() -> None:
    told = rows(training_run(steps=24, eval_steps=8))
    assert list(told) == [
        "held-out reward", "training reward", "steps", "samples/s", "lag", "dropped samples", "length bias",
        "trainer waited", "incidents",
    ]  # fmt: skip
    assert told["held-out reward"] == ("0.100 → 0.550", "after step 0 and 24, 64 samples")
    assert told["steps"][0].startswith("24 in 3 min")
    assert "tokens/s trained" in told["samples/s"][1] and "generated" in told["samples/s"][1]
    assert "zero_variance" in told["dropped samples"][1]
    assert told["length bias"] == ("-2.4%", "trained 400.0 tokens, started 410.0, dropped at 600.0")
    assert told["incidents"] == ("2", "1 error, 1 restart")


def test_a_held_out_reward_that_fell_names_the_best() -> None:
    events = [ev(n, "validate.end", "validate", trained=n, reward=r, samples=9) for n, r in enumerate((0.1, 0.9, 0.4))]
    assert rows(events)["held-out reward"] == ("0.100 → 0.400", "after step 0 and 2, 9 samples; best 0.900 after 1")


def test_the_held_out_reward_says_what_is_missing_from_it_and_whether_versions_are_mixed() -> None:
    failed = {"failed": 15, "fault": "ValueError: no"}
    why = "15 of 20 answers without a verdict left out: ValueError: no"
    some = [ev(0, "validate.end", "validate", trained=5, reward=1.0, samples=5, mixed=True, **failed)]
    none = [ev(0, "validate.end", "validate", trained=5, reward=0.0, samples=0, **failed)]
    assert rows(some)["held-out reward (mixed versions)"] == ("1.00", f"after step 5, 5 samples; after 5 {why}")
    assert rows(none)["held-out reward"] == ("-", why.replace("of 20", "of 15"))


def test_engines_that_answer_with_another_policy_are_named() -> None:
    def told(lag: int, kl: float, optimizer_steps: float = 1.0) -> list[LoggedEvent]:
        said = {"train/behaviour_kl": kl, "train/optimizer_steps": optimizer_steps}
        trained = ev(
            2, "group.train", "train", group=1, trained=0, oldest=-lag, in_flight=lag, in_queue=0, samples=8, actions=80
        )
        return [
            ev(1, "step.begin", "train", trained=0, groups=1),
            trained,
            ev(3, "step.end", "train", trained=1, **said),
        ]

    assert rows(told(0, 0.215))["engine ≠ trainer"] == (
        "0.215",
        "KL a token on the same weights, after step 1; 1 steps",
    )
    for quiet in (told(0, 0.001), told(1, 0.215), told(0, 0.215, optimizer_steps=4.0)):
        assert "engine ≠ trainer" not in rows(quiet)


def test_steps_made_again_count_once() -> None:
    value, note = rows(resumed_run(first=12, back_to=10, then=8))["steps"]
    assert value.startswith("18 in") and note.endswith("2 made again after a loss")


def test_many_reasons_are_cut_short_and_their_sum_is_kept() -> None:
    drops = {"a": 4, "b": 3, "c": 2, "d": 1, "e": 1}
    events = [
        ev(1, "sample.end", "reward", sample=f"{reason}{n}", end="dropped", reason=reason)
        for reason, count in drops.items()
        for n in range(count)
    ]
    assert rows(events)["dropped samples"] == ("11 (100.0%)", "a 4, b 3, c 2, other 2")


def test_an_empty_run_has_a_table_that_fits() -> None:
    for events in ([], training_run(steps=12)):
        stream = io.StringIO()
        print_training_summary(make_run_report(events), Console(file=stream, width=110, force_terminal=False))
        assert "steps" in stream.getvalue()
        assert "…" not in stream.getvalue()


def test_validation_samples_are_not_counted_as_started() -> None:
    events = [
        ev(0, "sample.start", "generate", sample="a"),
        ev(0, "sample.start", "validate", sample="v0"),
        ev(1, "sample.finish", "validate", sample="v0", actions=1, oldest=0, newest=0),
        ev(2, "sample.end", "train", sample="a", end="trained"),
    ]
    ends = make_run_report(events).ends
    assert (ends.started, ends.finished, ends.trained) == (1, 0, 1)
