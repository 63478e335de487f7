"""The rows of the table, and what a run's events say about its steps."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from headway.monitor.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    name: str
    scorer: str
    serial: bool = False
    alpha: int = 0
    hybrid: bool = True


ROWS = (
    Row(name="hybrid, serial reward", scorer="cpu", serial=True),
    Row(name="hybrid, with_reward", scorer="cpu"),
    Row(name="hybrid, serial reward", scorer="http", serial=True),
    Row(name="hybrid, with_reward", scorer="http"),
    Row(name="decoupled, one-step-off", scorer="http", alpha=1, hybrid=False),
    Row(name="decoupled, α = 2", scorer="http", alpha=2, hybrid=False),
)


def costs(args: argparse.Namespace, events: list[Event]) -> dict[str, float]:
    """Of the steps after the warm-up; the last α, whose samples were paid for before, do not count."""
    begins = {event.data["trained"] + 1: event.time_s for event in events if event.kind == "step.begin"}
    ends = {event.data["trained"]: event for event in events if event.kind == "step.end"}
    first, last = args.warmup, args.warmup + args.steps
    since_s, until_s = ends[first].time_s, ends[last].time_s
    span_s = until_s - since_s
    made_s = busy(events, since_s, until_s)
    steps = range(first + 1, last + 1)
    return {
        "step_s": span_s / args.steps,
        "samples_per_s": sum(ends[step].data["samples"] for step in steps) / span_s,
        "denoise_s": made_s / args.steps,
        "train_s": sum(ends[step].time_s - begins[step] for step in steps) / args.steps,
        "update_s": spans(events, "load"),
        "lag": sum(ends[step].data.get("train/lag_mean", 0.0) for step in steps) / args.steps,
    }


def busy(events: list[Event], since_s: float, until_s: float) -> float:
    """Seconds in which the engine had something to make."""
    found, inside, at_s = 0.0, 0, since_s
    for event in events:
        if event.kind not in ("request.start", "request.end"):
            continue
        now_s = min(max(event.time_s, since_s), until_s)
        found += (now_s - at_s) * (inside > 0)
        at_s = now_s
        inside += 1 if event.kind == "request.start" else -1
    return found


def spans(events: list[Event], name: str) -> float:
    """Mean length of the spans of a name."""
    begun: dict[int, float] = {}
    found = []
    for event in events:
        if event.kind == "span.begin" and event.data["name"].startswith(name):
            begun[event.data["span"]] = event.time_s
        elif event.kind == "span.end" and event.data["span"] in begun:
            found.append(event.time_s - begun[event.data["span"]])
    return sum(found) / max(len(found), 1)
