"""Chaos on real processes: runs of `headway train` in which somebody is killed, at a random moment, with SIGKILL.

    python benchmarks/chaos.py                          # 6 runs of each kind
    python benchmarks/chaos.py --only trainer --runs 20 --seed 100
    python benchmarks/chaos.py --out chaos.jsonl        # a line for each run, as they end

Whom and when is drawn from the seed of the run: a kill comes some moment after a step that was drawn, or while the run
starts. After each run: all steps are done; every started sample is in exactly one state of the ledger; nothing that was
finished is lost and nothing is trained twice; no sample was older than the bound; no process, no actor or placement
group of Ray, and no shared memory is left. Exit code 1 where anything of it does not hold; what was left of such a run
is kept. Seen so far: docs/results/chaos.md.

All of it runs with a `/dev/shm` of its own where the system lets it, so that what is found there afterwards was left by
nobody else; where it does not, the first line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import Random

from chaos.checks import Promises, examine, examine_after
from chaos.kinds import KINDS, Kind
from chaos.runs import OPTIONS, STEPS, Run, segments
from chaos.stages import Stage
from rich.console import Console
from rich.table import Table

ALONE = "HEADWAY_CHAOS_ALONE"
LONGEST_S = 600.0
"""Of a run; one that takes longer hangs."""
MOST_AFTER_S = 0.6
"""Between the step that was drawn and the kill."""


@dataclass
class Row:
    """One run."""

    kind: str
    seed: int
    victim: str = ""
    after_step: int = 0
    promised: int = 0
    """Samples that were finished when the kill came."""
    wall_s: float = 0.0
    lag: int = 0
    restarts: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    args = _arguments()
    _have_memory_alone()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kinds = [kind for kind in KINDS if kind.name in args.only and (not kind.needs or find_spec(kind.needs))]
    room = Path(tempfile.mkdtemp(prefix="chaos-"))
    model, rows, console = _model(room), list[Row](), Console(width=140, highlight=False)
    for kind, seed in ((kind, args.seed + number) for number in range(args.runs) for kind in kinds):
        rows.append(row := hurt(kind, seed, room / f"{kind.name.replace(' ', '-')}-{seed}", model))
        console.print(_line(row), markup=False, soft_wrap=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(row)) + "\n")
    console.print(_table(rows))
    if any(row.problems for row in rows):
        console.print(f"what is left of the runs is in {room}")
        return 1
    shutil.rmtree(room)
    return 0


def _have_memory_alone() -> None:
    """Start again where `/dev/shm` is empty and nobody else's."""
    if ALONE in os.environ:
        return
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    prefix = [*unshare, "sh", "-c", 'mount -t tmpfs headway-chaos /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
        os.execvpe(prefix[0], [*prefix, sys.executable, *sys.argv], {**os.environ, ALONE: "1"})
    print("/dev/shm is shared with others: what they leave there is counted, too")


def hurt(kind: Kind, seed: int, directory: Path, model: Path) -> Row:
    """One run, one kill, and what came of it."""
    before = segments()
    with kind.stage() as stage:
        run = Run(directory, _words(kind, stage, seed, directory, model))
        try:
            row = _hurt_on(stage, kind, seed, run, before)
        finally:  # also when somebody interrupts
            for pid in run.left():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    row.problems += examine_after(stage, before)
    return row


def _hurt_on(stage: Stage, kind: Kind, seed: int, run: Run, before: set[str]) -> Row:
    row, dice, began_s = Row(kind.name, seed), Random(f"{kind.name}/{seed}"), time.monotonic()
    promises = Promises(run)
    run.start()
    row.problems += _strike(run, kind, stage, dice, row, promises)
    if kind.resumes and not row.problems:
        run.end(LONGEST_S)
        row.problems += promises.look()
        run.start(*(["--resume"] if (run.directory / "ledger.sqlite").exists() else []))
    if run.end(LONGEST_S) != 0:
        row.problems.append(f"ended with {run.process and run.process.poll()}: {run.text[-600:]}")
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.end(LONGEST_S)
    found = examine(run, promises, stage, before)
    row.problems += found.problems
    row.samples, row.lag, row.restarts = found.samples, found.lag, found.restarts.total()
    row.wall_s = time.monotonic() - began_s
    if not row.problems:
        shutil.rmtree(run.directory)
    return row


def _strike(run: Run, kind: Kind, stage: Stage, dice: Random, row: Row, promises: Promises) -> list[str]:
    """Wait for the moment, and kill. What kept it from happening, in words."""
    if kind.scales_to:
        run.until(lambda: run.count("step.end") >= 1, LONGEST_S)
        if problem := _scaled(run, kind.scales_to):
            return [problem]
    row.after_step = dice.randrange(0, STEPS - 2)
    first = "step.end" if row.after_step else "run.begin"
    if not run.until(lambda: run.count(first) >= max(row.after_step, 1), LONGEST_S):
        return [f"step {row.after_step} never came"]
    time.sleep(dice.random() * MOST_AFTER_S)
    chosen: list[tuple[str, list[int]]] = []

    def somebody() -> bool:
        found = kind.victim(run, dice, stage)
        chosen.extend([found] if found else [])
        return bool(found)

    if not run.until(somebody, LONGEST_S):
        return ["nobody to kill was found before the run ended"]
    promises.look()
    row.promised = len(promises)
    row.victim, pids = chosen[0]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return []


def _scaled(run: Run, engines: int) -> str:
    from headway.errors import HeadwayError
    from headway.processes.control_socket import send_control_request

    try:
        send_control_request(run.directory, {"engines": engines})
    except HeadwayError as error:
        return f"scale: {error}"
    return ""


def _words(kind: Kind, stage: Stage, seed: int, directory: Path, model: Path) -> list[str]:
    options = {**OPTIONS, **kind.options, **stage.options, "seed": seed, "pretrain": model, "output_dir": directory}
    return [f"{key}={value}" for key, value in options.items()]


def _model(room: Path) -> Path:
    """A decoder with random weights: its answers are noise."""
    from headway.models.tiny_model import make_tiny_model

    make_tiny_model(room / "model", steps=0)
    return room / "model"


def _line(row: Row) -> str:
    what = "; ".join(row.problems) or "as if nothing had happened"
    when = f"after step {row.after_step}" if row.after_step else "as it started"
    return f"{row.kind} {row.seed}: {row.victim} killed {when}, {row.restarts} restarts, {row.wall_s:.0f} s: {what}"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"{len(rows)} runs of {STEPS} steps, one SIGKILL each")
    headings = ("killed", "runs", "ended all steps, nothing wrong", "restarts", "worst lag")
    for name in (*headings, "finished before", "dropped", "median s"):
        table.add_column(name, justify="left" if name == "killed" else "right")
    for kind in dict.fromkeys(row.kind for row in rows):
        ours = [row for row in rows if row.kind == kind]
        table.add_row(
            kind,
            str(len(ours)),
            str(sum(not row.problems for row in ours)),
            str(sum(row.restarts for row in ours)),
            str(max(row.lag for row in ours)),
            str(sum(row.promised for row in ours)),
            str(sum(count for row in ours for end, count in row.samples.items() if end.startswith("dropped"))),
            f"{sorted(row.wall_s for row in ours)[len(ours) // 2]:.1f}",
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="kinds (all)")
    parser.add_argument("--runs", type=int, default=6, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first run of each kind")
    parser.add_argument("--out", type=Path, help="a JSON line for each run, appended")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
