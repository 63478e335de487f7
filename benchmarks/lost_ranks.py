"""Lose one of two ranks of a trainer in every phase of its work, by SIGKILL and by SIGSTOP, on the CPU with gloo.

    python benchmarks/lost_ranks.py                     # all phases, both signals, both ranks: some minutes
    python benchmarks/lost_ranks.py --only checkpoint   # phases whose name has this word

Each line is one loss: the seconds until the error, the seconds until all ranks are back with the newest checkpoint, and
who the error names. The exit code is 1 if one took longer than its deadline, named another rank, or did not come back.
Ranks are forks of a process that has imported everything. Results: docs/results/lost_ranks.md.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from tests.processes.template_pool import Pool
from tests.trainers.lost_ranks import JOIN_S, PHASES, LostRank, Phase, longest_s, lose_rank


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="phases whose name has this word")
    args = parser.parse_args()
    pool, problems = Pool("tests.trainers.sharded_targets"), 0
    print("| phase | call | signal | rank | error after | back after | named in the error |")
    print("|---" * 7 + "|")
    for name, phase in PHASES.items():
        for number in (signal.SIGKILL, signal.SIGSTOP) if args.only in name else ():
            for victim in phase.ranks:
                line, is_right = lose_and_describe(pool, name, phase, number, victim)
                print(line, flush=True)
                problems += not is_right
    pool.close()
    print(f"\n{problems} of them did not end as they should")
    return min(problems, 1)


def lose_and_describe(pool: Pool, name: str, phase: Phase, number: signal.Signals, victim: int) -> tuple[str, bool]:
    """Lose a rank once, and return a line of the table and whether everything was as it should be."""
    found: list[LostRank] = []

    async def scenario(directory: Path) -> None:
        found.append(await lose_rank(phase, number, victim, directory, lambda spec: pool.start(spec, JOIN_S)))

    start = f"| {name} | {phase.call} | {number.name} | {victim} "
    with tempfile.TemporaryDirectory() as directory:
        try:
            pool.run(scenario(Path(directory)), 120.0)
        except Exception as error:
            return f"{start}| – | – | {error} |", False
    (lost,) = found
    first = lost.error.splitlines()[0]
    names = re.findall(r"trainer/\d(?: \(process[^)]*\))?", first)
    named, said = re.sub(r"process \d+", "process", (names or [first])[0]), re.search(r"in phase (\w+)", first)
    named += f" in phase {said[1]}" if said else ""
    is_right = f"trainer/{victim}" in named and lost.error_s < longest_s(phase) and lost.version >= 1
    return f"{start}| {lost.error_s:.1f} s | {lost.back_s:.1f} s | {named}{'' if is_right else ' (wrong)'} |", is_right


if __name__ == "__main__":
    sys.exit(main())
