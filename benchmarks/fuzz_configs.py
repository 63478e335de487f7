"""Feeds mutated configurations to `headway config check`: each is accepted or refused, quickly and in little memory.

    python benchmarks/fuzz_configs.py --mutations 10000 --seed 0

The files and command lines of other projects (`../shared/peers`, where it is there) and of `examples/` are cut off,
their lines and keys swapped, types changed, bytes flipped and values replaced. A traceback, an answer after more than
10 s of the processor or 120 s of the clock, or more than 1 GB on top of what the process had is a finding. Each finding
is printed with what reproduces it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.cli import main as run_headway

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT.parent / "shared" / "peers"
LIMIT_S, LIMIT_CLOCK_S, LIMIT_BYTES = 10, 120, 1 << 30
_PAIR = re.compile(r"^(\s*(?:- )?)([\w.\"'-]+):(.*)$")
VALUES = [
    *["", "null", "true", "false", "0", "-1", "1", "0.5", "1e309", "-1e-400", ".nan", ".inf", "9" * 400, "x" * 5000],
    *["[]", "{}", "[[]]", "[null]", "[1, a, {b: 2}]", "{a: {b: 1}}", "{1: 2}", "{? [a] : b}", "[1,", "{a", "'", '"'],
    *["${pretrain}", "${nothing.here}", "${", "${}", "${.x}", "${......x}", "${oc.env:HOME}", "${oc.env:NOT_SET}"],
    *["${actor_train}", "a ${actor_train} b", "${${pretrain}}", "${now:%Y}", "${oc.select:a,b}", "\\${x}"],
    *["list(range(0,8))", "list(range(0,999999999999))", "range(8,0)", "list(range(-1))", "[0,0]", "0-7", "7" * 30],
    *["!!python/object/apply:os.system [x]", "!!int x", "!!binary x", "!x y", "&a [*a]", "*nowhere", "&a", "<<: *b"],
    *["1:30", "2024-01-01", "1_000", "0x1F", "0o7", "010", "1e-6x", "5e3run", "yes", "off", "~", "=", "|", ">-", "%"],
    *["\x00", "\x1b[31m", "\ufeff", "\u2028", "\t", "🧮", "a: b", "a: b: c", "- a", "? a", "# x", "---", "..."],
    *["/dev/null", "/no/such", "..", "os:system", "roll.x.Y", "megatron_train", "vllm", "gae", "all-linear", "a,b,,c"],
]
"""Values that programs stumble over."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """A configuration as a user has it: a file, or the words of a command line."""

    name: str
    path: Path | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A mutation that was neither accepted nor refused as it should be."""

    what: str
    specimen: str
    seed: int
    detail: str


@dataclass(slots=True)
class FuzzResult:
    """What came of many mutations."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    slowest_s: float = 0.0
    most_bytes: int = 0

    def add(self, other: FuzzResult) -> None:
        self.outcomes += other.outcomes
        self.findings += other.findings
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.most_bytes = max(self.most_bytes, other.most_bytes)


def list_specimens() -> list[Specimen]:
    """Return everything that is mutated, in a fixed order."""
    files = [*sorted((ROOT / "examples").rglob("*.yaml")), *sorted((PEERS / "roll").rglob("*.yaml"))]
    found = [Specimen(f"{path.parent.name}/{path.name}", path=path) for path in files if path.parent.name != "config"]
    for file in sorted(PEERS.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            found.append(Specimen(f"{file.stem}:{item['script']}", words=tuple(item["argv"])))
    return found


def mutate_text(text: str, chance: random.Random) -> bytes:
    """Return the text of a file with one to three changes, as bytes because some are no text any more."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        text = chance.choice(
            (_truncate, _swap_lines, _replace_value, _replace_value, _rename_key, _swap_keys, _indent)
        )(text, chance)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data and chance.random() < 0.2:
        for _ in range(chance.choice((1, 2, 8, 64))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def _truncate(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text) + 1)]


def _swap_lines(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    first, second = chance.randrange(len(lines)), chance.randrange(len(lines))
    action = chance.choice(("swap", "repeat", "drop"))
    if action == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    elif action == "repeat":
        lines.insert(second, lines[first])
    else:
        del lines[first : first + chance.choice((1, 2, 5))]
    return "\n".join(lines)


def _choose_pair(lines: list[str], chance: random.Random) -> int | None:
    places = [place for place, line in enumerate(lines) if _PAIR.match(line)]
    return chance.choice(places) if places else None


def _replace_value(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    if (place := _choose_pair(lines, chance)) is not None:
        lines[place] = _PAIR.sub(lambda match: f"{match[1]}{match[2]}: {chance.choice(VALUES)}", lines[place])
    return "\n".join(lines)


def _rename_key(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    if (place := _choose_pair(lines, chance)) is not None:
        lines[place] = _PAIR.sub(lambda match: f"{match[1]}{_misspell(match[2], chance)}:{match[3]}", lines[place])
    return "\n".join(lines)


def _swap_keys(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    first, second = _choose_pair(lines, chance), _choose_pair(lines, chance)
    if first is None or second is None:
        return text
    one, other = _PAIR.match(lines[first]), _PAIR.match(lines[second])
    assert one is not None and other is not None
    lines[first], lines[second] = f"{one[1]}{other[2]}:{one[3]}", f"{other[1]}{one[2]}:{other[3]}"
    return "\n".join(lines)


def _indent(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    start = chance.randrange(len(lines))
    shift = chance.choice((-2, 2, 4))
    for place in range(start, min(len(lines), start + chance.choice((1, 3, 20)))):
        lines[place] = " " * shift + lines[place] if shift > 0 else lines[place].removeprefix("  ")
    return "\n".join(lines)


_CHANGES = (_truncate, _swap_lines, _replace_value, _replace_value, _rename_key, _swap_keys, _indent)


def _misspell(word: str, chance: random.Random) -> str:
    place = chance.randrange(len(word) + 1)
    action = chance.choice(("drop", "double", "turn", "other"))
    if action == "drop":
        return word[:place] + word[place + 1 :]
    if action == "double":
        return word[:place] + word[place - 1 : place] + word[place:]
    if action == "turn":
        return word[:place] + word[place : place + 2][::-1] + word[place + 2 :]
    return chance.choice(VALUES)


def mutate_words(words: Sequence[str], chance: random.Random) -> list[str]:
    """Return the words of a command line with one to three changes."""
    changed = list(words)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if not changed:
            break
        place = chance.randrange(len(changed))
        key, equals, value = changed[place].partition("=")
        other_key, _, other_value = chance.choice(changed).partition("=")
        changed[place] = chance.choice(
            (
                f"{key}={chance.choice(VALUES)}",
                f"{key}={chance.choice(VALUES)}",
                f"{key}={other_value}",
                f"{other_key}={value}",
                f"{_misspell(key, chance)}{equals}{value}",
                f"{chance.choice('+~-')}{changed[place]}",
                _truncate(changed[place], chance),
                _misspell(changed[place], chance),
            )
        )
        if chance.random() < 0.1:
            del changed[place : place + chance.choice((1, 3, 100))]
    return changed


def try_mutation(specimen: Specimen, seed: int, directory: Path) -> tuple[str, str]:
    """Return what came of a mutation, and the details if it is a finding."""
    chance = random.Random(f"{specimen.name} {seed}")
    action = chance.choice(("check", "check", "convert", "explain"))
    if specimen.path is not None:
        file = directory / specimen.path.name
        file.write_bytes(mutate_text(specimen.path.read_text(encoding="utf-8"), chance))
        arguments = ["config", action, str(file)]
    else:
        arguments = ["config", action, "--", *mutate_words(specimen.words, chance)]
    return run_quietly(arguments)


class _TookTooLong(BaseException):
    """Ends a mutation that is not answered in time."""


def run_quietly(arguments: list[str]) -> tuple[str, str]:
    """Return `accepted`, `refused` or a finding with its details."""

    def give_up(number: int, frame: object) -> None:
        raise _TookTooLong

    output, errors = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGPROF, give_up)
    signal.alarm(LIMIT_CLOCK_S)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # of the processor, which other programs may use as well
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = run_headway(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except (_TookTooLong, Exception) as error:
        stop_clocks()
        kind = (
            "too slow"
            if isinstance(error, _TookTooLong)
            else "memory"
            if isinstance(error, MemoryError)
            else "traceback"
        )
        return kind, traceback.format_exc(limit=-6)
    finally:
        stop_clocks()
    if code == 0:
        return "accepted", ""
    if code == 2 and errors.getvalue().strip():
        return "refused", ""
    return "no message", f"exit code {code}, said {errors.getvalue()!r}"


def stop_clocks() -> None:
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_PROF, 0)


def fuzz_part(seeds: range) -> FuzzResult:
    """Try one mutation for each seed."""
    result, specimens = FuzzResult(), list_specimens()
    with tempfile.TemporaryDirectory() as directory:
        mutated = Path(directory) / "mutated"  # files include others as ../config/…
        mutated.mkdir()
        if PEERS.is_dir():
            (Path(directory) / "config").symlink_to(PEERS / "roll" / "config")
        for seed in seeds:
            specimen = specimens[seed % len(specimens)]
            start = time.process_time()
            outcome, detail = try_mutation(specimen, seed, mutated)
            result.slowest_s = max(result.slowest_s, time.process_time() - start)
            result.outcomes[outcome] += 1
            if outcome not in ("accepted", "refused"):
                result.findings.append(Finding(outcome, specimen.name, seed, detail))
    result.most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def limit_memory() -> None:
    """Let a process have 1 GB more than it has."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))


def fuzz(mutations: int, first_seed: int, jobs: int) -> FuzzResult:
    """Try `mutations` mutations in several processes."""
    parts = [
        range(start, min(start + 100, first_seed + mutations))
        for start in range(first_seed, first_seed + mutations, 100)
    ]
    result = FuzzResult()
    with multiprocessing.get_context("fork").Pool(jobs, limit_memory) as pool:
        for part in pool.imap(fuzz_part, parts):
            result.add(part)
    return result


def describe(result: FuzzResult) -> Iterator[str]:
    """Yield the lines of the report."""
    for outcome, count in result.outcomes.most_common():
        yield f"{outcome:10} {count:6}"
    yield f"slowest {result.slowest_s:.2f} s of the processor"
    yield f"most memory of a process {result.most_bytes / 2**20:.0f} MB"
    for finding in result.findings:
        yield f"\n{finding.what}: {finding.specimen}, seed {finding.seed}\n{finding.detail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first mutation")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    result = fuzz(args.mutations, args.seed, args.jobs)
    print("\n".join(describe(result)))
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
