"""The report page: one HTML file about one run or several, which opens from a disk and on a phone.

    Path("report.html").write_text(render_report_page(Path("runs/one")), encoding="utf-8")

It shows what ran, the results, curves over steps or over time, images and answers early and late, faults, the timeline,
and the tables of the terminal. Several runs are laid over each other, with the options they set differently. As on the
timeline, data travels in a JSON block that its text cannot leave, is written as text only, and nothing is loaded from
outside.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.config.resolved_config import list_leaves
from headway.config.schema import Config
from headway.monitor.report_charts import CHARTS, make_chart_columns, make_held_out_series
from headway.monitor.report_tables import format_duration, format_number, format_report_text, make_summary_rows
from headway.monitor.run_record import RunRecord, RunSegment, read_run_record
from headway.monitor.run_report import FAULT_KINDS, to_plain_json
from headway.monitor.timeline_page import draw_timeline, render_template

_MOST_FAULTS = 300
IGNORED_DIFFERENCES = ("output_dir", "checkpoint_dir", "exp_name", "resume")
"""Keys that differ between any two runs and explain nothing."""


def render_report_page(run: Path | RunRecord, *, compare: Sequence[Path | RunRecord] = ()) -> str:
    """Return the page about a run's directory, event log or record, with other runs laid over it."""
    records = [one if isinstance(one, RunRecord) else read_run_record(one) for one in (run, *compare)]
    return render_template("page.html", make_report_page_data(records))


def make_report_page_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what the page shows, the first run in full."""
    first, names = records[0], _make_distinct([record.name for record in records])
    timeline = draw_timeline(first.lanes, first.report, title=first.name) | {"embedded": True}
    data: dict[str, Any] = to_plain_json(
        {
            "runs": [_make_run_data(record, name) for record, name in zip(records, names, strict=True)],
            "charts": CHARTS,
            "differences": _find_differences(records) if len(records) > 1 else [],
            "timeline": render_template("timeline.html", timeline) if first.lanes.states or first.lanes.engines else "",
        }
    )
    return data


def _make_run_data(record: RunRecord, name: str) -> dict[str, Any]:
    faults = [row for row in record.lanes.markers if row[1] in FAULT_KINDS]
    return {
        "name": name,
        "state": describe_segments(record.segments, is_alive=record.is_alive),
        "facts": list_facts(record.config, record.segments),
        "rows": make_summary_rows(record.report),
        "steps": make_chart_columns(record.curves.steps.values()),
        "held_out": make_held_out_series(record.curves.held_out.values()),
        "alpha": record.config.get("async_generation_ratio"),
        "resumed": [(segment.begin.trained, segment.begun_s) for segment in record.segments[1:]],
        "answers": record.answers,
        "pictures": {"pairs": record.images},
        "faults": [(format_duration(time_s), kind, who, text) for time_s, kind, who, text in faults[:_MOST_FAULTS]],
        "faults_left_out": max(0, len(faults) - _MOST_FAULTS),
        "tables": format_report_text(record.report),
    }


def describe_segments(segments: Sequence[RunSegment], *, is_alive: bool) -> tuple[str, str]:
    """Return the state of a run with these parts and a description of it.

    The state is `going`, `done`, `stopped`, `silent` (the log has no end and is not written to), or empty for logs
    that do not say.
    """
    if not segments:
        return "", ""
    end = segments[-1].end
    if end is None:
        return ("going", "still running") if is_alive else ("silent", "ended without a word, perhaps killed")
    if not end.reason if end.finished is None else end.finished:
        return "done", "finished"
    return "stopped", f"ended early: {end.reason or 'no reason given'}"


def list_facts(given: Mapping[str, Any], segments: Sequence[RunSegment]) -> list[tuple[str, str]]:
    """Return names and values of what the given options and the parts of a run say about it."""
    facts = _list_configured_facts(given) if given else []
    if segments:
        begin = segments[-1].begin
        facts += [("machine", begin.machine or ""), ("headway", begin.headway or "")]
    if len(segments) > 1:
        facts.append(("resumed", f"{len(segments) - 1} ×"))
    return [(name, text) for name, text in facts if text]


def _list_configured_facts(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    config = {**dict(list_leaves(Config())), **given}
    data = config.get("actor_train.data_args.file_name") or config.get("train_env_manager.tags") or ""
    alpha = config["async_generation_ratio"]
    group = config.get("train_env_manager.group_size") or config["num_return_sequences_in_group"]
    rate = config.get("actor_train.training_args.learning_rate")
    return [
        ("model", str(config["pretrain"] or "")),
        ("data", ", ".join(map(str, data)) if isinstance(data, list | tuple) else str(data)),
        ("α", f"{alpha:g}" + (" (synchronous)" if not alpha else f", {config['staleness_policy']}")),
        ("algorithm", f"{config['adv_estimator']}, {config['pg_variant']}"),
        ("batch", f"{config['rollout_batch_size']} groups of {group}"),
        ("learning rate", "" if rate is None else f"{rate:g}" if isinstance(rate, float) else str(rate)),
        ("response length", "" if config["response_length"] is None else format_number(config["response_length"])),
        ("seed", str(config["seed"])),
    ]


def _find_differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the options that the runs set differently, with the value of each run."""
    if not all(record.config for record in records):
        return []
    defaults = dict(list_leaves(Config()))
    keys = dict.fromkeys(key for record in records for key in record.config)
    rows = [(key, [str(record.config.get(key, defaults.get(key))) for record in records]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key not in IGNORED_DIFFERENCES]


def _make_distinct(names: Sequence[str]) -> list[str]:
    """Return names that tell runs apart even if their directories have the same name."""
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]
