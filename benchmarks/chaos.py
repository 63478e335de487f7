"""Chaos on real processes: runs of `headway train` in which a random process is killed with SIGKILL.

    python benchmarks/chaos.py                          # 6 runs of each kind of fault
    python benchmarks/chaos.py --only trainer --runs 20 --seed 100
    python benchmarks/chaos.py --fork                   # runs are forks of a process that has imported everything
    python benchmarks/chaos.py --out chaos.jsonl        # appends a JSON line for each run

The seed of the run decides the victim and the moments: shortly after a random step, while the run starts, while it
writes a checkpoint, while it resumes. After each run these must hold: all steps are done; every started sample is in
exactly one state of the ledger; no finished sample is lost and none is trained twice; every task of the first epoch
was trained once; no sample was older than the bound; no process, no actor or placement group of Ray, and no shared
memory is left. Otherwise the exit code is 1, and the files of the run are kept. Results: docs/results/chaos.md.

If the system allows it, everything runs with a `/dev/shm` of its own, so that other programs leave nothing there; if
not, the first line says so.
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

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.chaos.fault_checks import FinishedSamples, check_platform_removed, check_run
from benchmarks.chaos.fault_kinds import FAULT_KINDS, FaultKind
from benchmarks.chaos.fault_moments import RUN_TIMEOUT_S, AwaitMoment
from benchmarks.chaos.fault_platforms import RunPlatform
from benchmarks.chaos.fault_runs import ALPHA, EPOCH, OPTIONS, STEPS, ChaosRun, list_shared_segments
from tests.runs.template import Template

PRIVATE_SHM = "HEADWAY_CHAOS_ALONE"


@dataclass
class ChaosResult:
    """The result of one run."""

    kind: str
    seed: int
    victims: list[str] = field(default_factory=list)
    after_steps: list[int] = field(default_factory=list)
    """Step that the run had reached at each kill."""
    promised: int = 0
    """Samples that were finished at the kill."""
    wall_s: float = 0.0
    lag: int = 0
    restarts: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    args = _parse_arguments()
    _restart_with_private_shm()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kinds = [kind for kind in FAULT_KINDS if kind.name in args.only and (not kind.needs or find_spec(kind.needs))]
    scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
    model, rows, console = _make_model(scratch), list[ChaosResult](), Console(width=140, highlight=False)
    template = Template(scratch) if args.fork else None
    for kind, seed in ((kind, args.seed + number) for number in range(args.runs) for kind in kinds):
        directory = scratch / f"{kind.name.replace(' ', '-')}-{seed}"
        rows.append(row := run_with_fault(kind, seed, directory, model, template))
        console.print(_format_line(row), markup=False, soft_wrap=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(row)) + "\n")
    console.print(_make_table(rows))
    if template is not None:
        template.close()
    if any(row.problems for row in rows):
        console.print(f"what is left of the runs is in {scratch}")
        return 1
    shutil.rmtree(scratch)
    return 0


def _restart_with_private_shm() -> None:
    """Restart this program in a namespace with an empty `/dev/shm` of its own, if possible."""
    if PRIVATE_SHM in os.environ:
        return
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    prefix = [*unshare, "sh", "-c", 'mount -t tmpfs headway-chaos /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
        os.execvpe(prefix[0], [*prefix, sys.executable, *sys.argv], {**os.environ, PRIVATE_SHM: "1"})
    print("/dev/shm is shared with others: what they leave there is counted, too")


def run_with_fault(
    kind: FaultKind, seed: int, directory: Path, model: Path, template: Template | None = None
) -> ChaosResult:
    """Run once, kill once, and return the result."""
    before = list_shared_segments()
    with kind.make_platform() as platform:
        run = ChaosRun(directory, _make_options(kind, platform, seed, directory, model), template)
        try:
            row = _run_on_platform(platform, kind, seed, run, before)
        finally:  # also after an interrupt
            for pid in run.list_processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    row.problems += check_platform_removed(platform, before)
    return row


def _run_on_platform(platform: RunPlatform, kind: FaultKind, seed: int, run: ChaosRun, before: set[str]) -> ChaosResult:
    row, dice, began_s = ChaosResult(kind.name, seed), Random(f"{kind.name}/{seed}"), time.monotonic()
    finished = FinishedSamples(run)
    run.start()
    for await_moment in kind.moments:
        row.problems += _kill_victim(run, kind, await_moment, platform, dice, row, finished)
        if row.problems:
            break
        if kind.resumes:
            run.wait(RUN_TIMEOUT_S)
            row.problems += finished.check()
            run.start(*(["--resume"] if (run.directory / "ledger.sqlite").exists() else []))
    if run.wait(RUN_TIMEOUT_S) != 0:
        row.problems.append(f"ended with {run.process and run.process.poll()}: {run.output[-600:]}")
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(RUN_TIMEOUT_S)
    alpha = int(str(kind.options.get("async_generation_ratio", ALPHA)))
    found = check_run(run, finished, platform, before, alpha=alpha)
    row.problems += found.problems
    row.samples, row.lag, row.restarts = found.samples, found.lag, found.restarts.total()
    row.wall_s = time.monotonic() - began_s
    if not row.problems:
        shutil.rmtree(run.directory)
    return row


def _kill_victim(
    run: ChaosRun,
    kind: FaultKind,
    await_moment: AwaitMoment,
    platform: RunPlatform,
    dice: Random,
    row: ChaosResult,
    finished: FinishedSamples,
) -> list[str]:
    """Wait for the moment, then kill the victim. Return the problem that prevented it, if any."""
    if kind.scales_to:
        run.wait_until(lambda: run.count_events("step.end") >= 1, RUN_TIMEOUT_S)
        if problem := _scale(run, kind.scales_to):
            return [problem]
    if problem := await_moment(run, dice):
        return [problem]
    row.after_steps.append(run.count_steps())
    chosen: list[tuple[str, list[int]]] = []

    def find_victim() -> bool:
        found = kind.select_victim(run, dice, platform)
        chosen.extend([found] if found else [])
        return bool(found)

    if not run.wait_until(find_victim, RUN_TIMEOUT_S):
        return ["nobody to kill was found before the run ended"]
    finished.check()
    row.promised = len(finished)
    name, pids = chosen[0]
    row.victims.append(name)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return []


def _scale(run: ChaosRun, engines: int) -> str:
    from headway.errors import HeadwayError
    from headway.processes.control_socket import send_control_request

    try:
        send_control_request(run.directory, {"engines": engines})
    except HeadwayError as error:
        return f"scale: {error}"
    return ""


def _make_options(kind: FaultKind, platform: RunPlatform, seed: int, directory: Path, model: Path) -> list[str]:
    options = {**OPTIONS, **kind.options, **platform.options, "seed": seed, "pretrain": model, "output_dir": directory}
    options["actor_train.data_args.file_name"] = model.with_name("addition.jsonl")
    return [f"{key}={value}" for key, value in options.items()]


def _make_model(scratch: Path) -> Path:
    """Make a decoder with random weights, and a file of tasks beside it."""
    from headway.models.tiny_model import make_tiny_model

    make_tiny_model(scratch / "model", steps=0)
    rows = [{"prompt": f"{n} + {n + 3} = ?", "answer": str(2 * n + 3)} for n in range(EPOCH)]
    (scratch / "addition.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return scratch / "model"


def _format_line(row: ChaosResult) -> str:
    what = "; ".join(row.problems) or "as if nothing had happened"
    when = ", ".join(f"after step {step}" if step else "as it started" for step in row.after_steps)
    return (
        f"{row.kind} {row.seed}: {row.victims[:1]} killed {when}, {row.restarts} restarts, {row.wall_s:.0f} s: {what}"
    )


def _make_table(rows: Sequence[ChaosResult]) -> Table:
    table = Table(title=f"{len(rows)} runs of {STEPS} steps, killed with SIGKILL once or more")
    headings = ("killed", "runs", "ended all steps, nothing wrong", "restarts", "worst lag")
    for name in (*headings, "finished before", "dropped", "median s"):
        table.add_column(name, justify="left" if name == "killed" else "right")
    for kind in dict.fromkeys(row.kind for row in rows):
        results = [row for row in rows if row.kind == kind]
        table.add_row(
            kind,
            str(len(results)),
            str(sum(not row.problems for row in results)),
            str(sum(row.restarts for row in results)),
            str(max(row.lag for row in results)),
            str(sum(row.promised for row in results)),
            str(sum(count for row in results for end, count in row.samples.items() if end.startswith("dropped"))),
            f"{sorted(row.wall_s for row in results)[len(results) // 2]:.1f}",
        )
    return table


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [kind.name for kind in FAULT_KINDS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="kinds of faults (default: all)")
    parser.add_argument("--runs", type=int, default=6, help="number of runs of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run of each kind")
    parser.add_argument("--fork", action="store_true", help="fork runs from one process, which saves their imports")
    parser.add_argument("--out", type=Path, help="file to append a JSON line for each run to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
