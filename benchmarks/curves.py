"""Draw what `learning.py` wrote: held-out reward by step and by wall-clock, a line for each run.

python benchmarks/curves.py docs/results/learning_gpu_clock.jsonl --out docs/results/learning_gpu_clock.svg
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot


def main() -> None:
    """One picture of two panels."""
    args = arguments()
    cells = [json.loads(line) for line in args.curves.read_text(encoding="utf-8").splitlines()]
    good = [cell for cell in cells if "failed" not in cell]
    labels = list(dict.fromkeys(label(cell) for cell in good))
    colours = dict(zip(labels, cycle(pyplot.rcParams["axes.prop_cycle"].by_key()["color"]), strict=False))
    figure, (by_step, by_clock) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    named: set[str] = set()
    for cell in good:
        name = label(cell)
        steps, rewards = zip(*cell["held_out"], strict=True)
        look = {"color": colours[name], "marker": "o", "markersize": 3, "linewidth": 1.2}
        by_step.plot(steps, rewards, label=None if name in named else name, **look)
        by_clock.plot(cell["held_out_s"], rewards, **look)
        named.add(name)
    by_step.set(xlabel="steps", ylabel=args.what)
    by_clock.set(xlabel="seconds")
    for axes in (by_step, by_clock):
        axes.grid(alpha=0.3)
    by_step.legend(frameon=False)
    figure.savefig(args.out, metadata={"Date": None})


def label(cell: dict[str, Any]) -> str:
    """What runs of one colour have in common."""
    return f"α = {cell['alpha']:g}, {cell['loss']} {cell['extra']}".strip()


def arguments() -> argparse.Namespace:
    """What to draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("curves", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--what", default="held-out reward")
    return parser.parse_args()


if __name__ == "__main__":
    main()
