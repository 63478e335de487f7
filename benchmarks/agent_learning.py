"""Does an agent learn to cross the lake? `headway train examples/frozen_lake.yaml`, one run for each seed.

    python benchmarks/agent_learning.py --seeds 1 2 3 --at-once 3 --out docs/results/agent_learning
    python benchmarks/agent_learning.py --held-out 8 \\
        --set pretrain=tiny-sums sequence_length=200 max_steps=2 eval_steps=1 filter_zero_variance=false  # does it run?

Every run is a process of its own and begins with validation, so that its curve begins with the base. Held-out lakes,
`--held-out` of them, are never trained on; on each one episode is played at temperature 1. `OUT.jsonl` and `OUT.svg`
are written anew whenever a run has come further: what is stopped half-way leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.monitor.event_files import last_written_s, read_event_log
from headway.monitor.scalar_series import ScalarPoint, compute_scalars

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "frozen_lake.yaml"
LOOK_EVERY_S = 5.0
TRAINED = ("reward/train", "episode/success", "episode/invalid", "episode/turns", "groups/with_spread", "time/step_s")
HELD_OUT = ("reward/held_out", "held_out/success", "held_out/invalid", "held_out/turns")
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is known of one run so far. Curves are rows of a step and numbers by name."""

    seed: int
    overrides: list[str]
    machine: str
    lakes: int
    """Held-out ones."""
    steps: list[dict[str, float]] = field(default_factory=list)
    held_out: list[dict[str, float]] = field(default_factory=list)
    training_s: float = 0.0
    """From the first validation to the last step."""
    failed: str = ""

    def last(self, name: str, count: int = 3) -> float:
        """Mean over the last training steps."""
        values = [row[name] for row in self.steps[-count:] if name in row]
        return sum(values) / len(values) if values else math.nan


class Run:
    """One seed at work."""

    def __init__(self, args: argparse.Namespace, directory: Path, seed: int) -> None:
        self._directory, self._output = directory, directory.with_suffix(".out")
        self._written_s = -1.0
        overrides = [f"seed={seed}", f"val_batch_size={args.held_out}", "save_steps=0", "track_with=[]", *args.set]
        words = [sys.executable, "-m", "headway", "train", str(args.config), f"output_dir={directory}", *overrides]
        self.cell = Cell(seed=seed, overrides=overrides, machine=machine(), lakes=args.held_out)
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._output.open("w", encoding="utf-8") as output:
            env = {**os.environ, "PYTHONPATH": path}
            self.process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env)

    def look(self) -> bool:
        """Read what there is; whether there is more than the last time."""
        failed = bool(self.process.poll()) and not self.cell.failed
        if failed:
            self.cell = Cell(**{**asdict(self.cell), "failed": self._output.read_text(encoding="utf-8")[-600:]})
        written_s = last_written_s(self._directory)
        if written_s == self._written_s:
            return failed
        self._written_s = written_s
        points = list(compute_scalars(read_event_log(self._directory)))
        self.cell = Cell(**{**asdict(self.cell), **curves(points)})
        return True


def curves(points: list[ScalarPoint]) -> dict[str, Any]:
    """Training and validation by step, and the time between the first and the last of them."""
    steps = [_row(point, TRAINED) for point in points if "reward/train" in point.values]
    held_out = [_row(point, HELD_OUT) for point in points if "reward/held_out" in point.values]
    times = [point.time_s for point in points if point.values]
    return {"steps": steps, "held_out": held_out, "training_s": round(times[-1] - times[0], 1) if times else 0.0}


def _row(point: ScalarPoint, names: tuple[str, ...]) -> dict[str, float]:
    return {"step": point.step} | {name: round(point.values[name], 4) for name in names if name in point.values}


def main() -> None:
    """Run every seed, print one table."""
    args = arguments()
    waiting, runs = list(args.seeds), list[Run]()
    with tempfile.TemporaryDirectory(prefix="headway-agent-learning-") as scratch:
        try:
            while waiting or any(run.process.poll() is None for run in runs):
                while waiting and sum(run.process.poll() is None for run in runs) < args.at_once:
                    seed = waiting.pop(0)
                    runs.append(Run(args, Path(scratch) / str(seed), seed))
                time.sleep(LOOK_EVERY_S)
                keep(args, runs)
        finally:
            for run in runs:
                run.process.terminate()
                run.process.wait()
            keep(args, runs)
    cells = [run.cell for run in runs]
    show(cells)
    sys.exit(any(cell.failed for cell in cells))


def keep(args: argparse.Namespace, runs: list[Run]) -> None:
    """Write down what is known, where it has become more."""
    further = [run.look() for run in runs]
    if not any(further):
        return
    for cell in (run.cell for run in runs):
        if cell.held_out:
            told = ", ".join(f"{row['held_out/success']:.2f}" for row in cell.held_out if "held_out/success" in row)
            print(f"seed {cell.seed}: step {len(cell.steps)}, held-out success {told}", file=sys.stderr, flush=True)
    if args.out:
        cells = [asdict(run.cell) for run in runs]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{args.out}.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells), encoding="utf-8")
        Path(f"{args.out}.svg").write_text(picture([run.cell for run in runs]), encoding="utf-8")


def show(cells: list[Cell]) -> None:
    """A row for each seed; of success with its standard error."""
    table = Table("seed", "held-out success", "held-out invalid moves", "held-out reward", title=cells[0].machine)
    for column in ("training success, last 3 steps", "groups with spread", "steps", "s/step", "s"):
        table.add_column(column)
    for cell in cells:
        if cell.failed or not cell.held_out:
            table.add_row(str(cell.seed), f"failed: {cell.failed[-200:]}")
            continue
        first, last = cell.held_out[0], cell.held_out[-1]
        won = last.get("held_out/success", math.nan)
        error = math.sqrt(won * (1 - won) / cell.lakes)
        table.add_row(
            str(cell.seed),
            f"{first.get('held_out/success', math.nan):.2f} → {won:.2f} ± {error:.2f}",
            *(f"{first[name]:.2f} → {last[name]:.2f}" for name in ("held_out/invalid", "reward/held_out")),
            *(f"{cell.last(name):.2f}" for name in ("episode/success", "groups/with_spread")),
            str(len(cell.steps)),
            f"{cell.last('time/step_s', max(1, len(cell.steps) - 1)):.1f}",
            f"{cell.training_s:.0f}",
        )
    Console(width=170).print(table)


PANELS = (
    ("crossed the lake", "held_out/success", "episode/success"),
    ("moves not understood", "held_out/invalid", "episode/invalid"),
)
"""Title, curve of validation (thick), curve of training (thin)."""
WIDE, HIGH, GAP = 400, 240, 60


def picture(cells: list[Cell]) -> str:
    """Both panels side by side as SVG; every number in them is a share."""
    latest = max((row["step"] for cell in cells for row in (*cell.steps, *cell.held_out)), default=0) or 1
    size = f'width="{2 * (WIDE + GAP) + 20}" height="{HIGH + 90}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for place, (title, held_out, trained) in enumerate(PANELS):
        parts.append(f'<g transform="translate({GAP + place * (WIDE + GAP)},30)">{_axes(title, latest)}')
        for number, cell in enumerate(cells):
            color = COLORS[number % len(COLORS)]
            parts.append(_line(cell.steps, trained, latest, f'stroke="{color}" stroke-width="1" opacity="0.4"'))
            parts.append(_line(cell.held_out, held_out, latest, f'stroke="{color}" stroke-width="2.5"'))
        parts.append("</g>")
    for number, cell in enumerate(cells):
        at = f'x="{GAP + 90 * number}" y="{HIGH + 80}" fill="{COLORS[number % len(COLORS)]}"'
        parts.append(f"<text {at}>seed {cell.seed}</text>")
    parts.append(f'<text x="{GAP + 90 * len(cells)}" y="{HIGH + 80}">thick: held out, thin: training</text></svg>\n')
    return "\n".join(parts)


def _axes(title: str, latest: float) -> str:
    parts = [f'<text x="0" y="-10" font-weight="bold">{title}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = HIGH * (1 - share)
        parts.append(f'<path d="M0 {y:g} H{WIDE}" stroke="#ddd"/><text x="-32" y="{y + 4:g}">{share:.2f}</text>')
    every = max(1, round(latest / 6))
    for step in range(0, math.floor(latest) + 1, every):
        parts.append(f'<text x="{WIDE * step / latest:.1f}" y="{HIGH + 18}" text-anchor="middle">{step}</text>')
    return "".join([*parts, f'<text x="{WIDE / 2}" y="{HIGH + 34}" text-anchor="middle">step</text>'])


def _line(rows: list[dict[str, float]], name: str, latest: float, style: str) -> str:
    known = [(row["step"], row[name]) for row in rows if name in row]
    points = " ".join(f"{WIDE * step / latest:.1f},{HIGH * (1 - value):.1f}" for step, value in known)
    return f'<polyline points="{points}" fill="none" {style}/>'


def machine() -> str:
    """Where and what."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, CPU"
    return f"{device}, {os.cpu_count()} cores, commit {done.stdout.strip() or 'unknown'}"


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--config", type=Path, default=EXAMPLE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=96, help="lakes, each crossed once at every validation")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides for all runs")
    parser.add_argument("--out", type=Path, help="OUT.jsonl and OUT.svg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
