"""The rows of the table, and the costs of steps from the events of a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from headway.monitor.event_log import LoggedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of the table."""

    name: str
    scorer: str
    serial: bool = False
    alpha: int = 0
    hybrid: bool = True


ROWS = (
    Row(name="hybrid, verdicts for nothing", scorer="none"),
    Row(name="hybrid, serial reward", scorer="cpu", serial=True),
    Row(name="hybrid, with_reward", scorer="cpu"),
    Row(name="hybrid, serial reward", scorer="http", serial=True),
    Row(name="hybrid, with_reward", scorer="http"),
    Row(name="decoupled, one-step-off", scorer="http", alpha=1, hybrid=False),
    Row(name="decoupled, α = 2", scorer="http", alpha=2, hybrid=False),
)


def measure_costs(args: argparse.Namespace, events: list[LoggedEvent]) -> dict[str, float]:
    """Return the costs of the steps after the warm-up, without the last α, whose samples were made before.

    `neither_s` is the time in which nothing was denoised and nothing trained: all waited for scores or weights.
    """
    begins = {event.data["trained"] + 1: event.time_s for event in events if event.kind == "step.begin"}
    ends = {event.data["trained"]: event for event in events if event.kind == "step.end"}
    first, last = args.warmup, args.warmup + args.steps
    since_s, until_s = ends[first].time_s, ends[last].time_s
    span_s = until_s - since_s
    steps = range(first + 1, last + 1)
    denoising = find_request_spans(events)
    training = [(begins[step], ends[step].time_s) for step in ends if step in begins]
    denoised_s, trained_s = (measure_cover(spans, since_s, until_s) for spans in (denoising, training))
    return {
        "step_s": span_s / args.steps,
        "samples_per_s": sum(ends[step].data["samples"] for step in steps) / span_s,
        "denoise_s": denoised_s / args.steps,
        "train_s": trained_s / args.steps,
        "neither_s": (span_s - measure_cover(denoising + training, since_s, until_s)) / args.steps,
        "update_s": mean_span(events, "load"),
        "lag": sum(ends[step].data.get("train/lag_mean", 0.0) for step in steps) / args.steps,
    }


def find_request_spans(events: list[LoggedEvent]) -> list[tuple[float, float]]:
    """Return the spans in which the engine had requests in flight."""
    found, inside, since_s = [], 0, 0.0
    for event in events:
        if event.kind == "request.start":
            since_s, inside = (since_s if inside else event.time_s), inside + 1
        elif event.kind == "request.end":
            inside -= 1
            if not inside:
                found.append((since_s, event.time_s))
    return found


def measure_cover(spans: list[tuple[float, float]], since_s: float, until_s: float) -> float:
    """Return the seconds between the two times that lie in at least one span."""
    found, at_s = 0.0, since_s
    for begin_s, end_s in sorted(spans):
        begin_s, end_s = max(begin_s, at_s), min(end_s, until_s)
        if end_s > begin_s:
            found, at_s = found + end_s - begin_s, end_s
    return found


def mean_span(events: list[LoggedEvent], name: str) -> float:
    """Return the mean length of the spans of a name."""
    begun: dict[tuple[str, int], float] = {}  # every part of a run numbers its own spans
    found = []
    for event in events:
        if event.kind == "span.begin" and event.data["name"].startswith(name):
            begun[event.who, event.data["span"]] = event.time_s
        elif event.kind == "span.end" and (at := (event.who, event.data["span"])) in begun:
            found.append(event.time_s - begun.pop(at))
    return sum(found) / max(len(found), 1)
