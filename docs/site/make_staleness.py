"""Simulates one small run with several α and writes what each device did: the data of the figure in staleness.md.

python docs/site/make_staleness.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import headway
from headway.monitor.events import RequestEnd, RequestStart, StepBegin, StepEnd

PAGE = Path(__file__).parents[1] / "pictures" / "staleness.json"
ALPHAS = (0, 0.5, 1, 2, 4)
STEPS, BINS = 6, 120
SCENARIO = {
    "rollout_batch_size": 16,
    "num_return_sequences_in_group": 4,
    "prompt_length": 512,
    "response_length": 4096,
    "pg_variant": "tis",
    "seed": 3,
    "actor_train.device_mapping": [0, 1],
    "actor_infer.device_mapping": [2, 3, 4, 5],
    "simulation.response_tokens": {"kind": "lognormal", "mean": 600, "std": 600, "min": 16, "max": 4096},
    "simulation.engine.slots": 16,
    "simulation.trainer": {"gpu_s_per_token": 0.0012, "fixed_s": 2.0},
}
"""Two GPUs train and four generate; answers have a long tail."""


def describe_run(alpha: float) -> dict[str, Any]:
    """Return training steps as [begin, end, mean lag], and the requests under way in each part of the time."""
    run = headway.simulate(SCENARIO, {"async_generation_ratio": alpha}, steps=STEPS)
    begun, steps, running, changes = 0.0, [], 0, []
    lags = {step.trained: step.lag for step in run.report.throughput.steps}
    for time_s, event in run.events:
        if isinstance(event, StepBegin):
            begun = time_s
        elif isinstance(event, StepEnd):
            steps.append([round(begun, 1), round(time_s, 1), round(lags[event.trained], 2)])
        elif isinstance(event, RequestStart | RequestEnd):
            running += 1 if isinstance(event, RequestStart) else -1
            changes.append((time_s, running))
    end_s = steps[-1][1]
    bins, place, now = [], 0, 0
    for number in range(BINS):
        while place < len(changes) and changes[place][0] <= end_s * number / BINS:
            now, place = changes[place][1], place + 1
        bins.append(now)
    return {"alpha": alpha, "end_s": end_s, "steps": steps, "running": bins, "step_s": round(end_s / len(steps), 1)}


def main() -> None:
    PAGE.write_text(json.dumps([describe_run(alpha) for alpha in ALPHAS]) + "\n", encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
