"""What the dashboard costs: opening logs of up to ten million events, its memory, and a run that is looked at.

    python benchmarks/dashboard.py open [--events 100000 1000000 10000000] [--logs DIR]
    python benchmarks/dashboard.py write --logs DIR
    python benchmarks/dashboard.py cost --model DIR [--steps 60] [--rounds 3]

`open` writes logs as a run does (64 samples a step on four engines, stretches and their index), starts
`headway dashboard`, and measures until the page is usable: in Chromium where there is one, over HTTP elsewhere. `write` only writes
the logs, so that `open` can be repeated with them. `cost` trains a tiny model with nobody looking and with a page that follows it, in
turns, and compares the processor time of the training process, which does not depend on what else the machine does.
"""

# ruff: noqa: E501  # lines of a log are long

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.dashboard.chromium import find_chromium, open_browser

from headway.monitor.event_files import LOG_FILE, STRETCHES
from headway.monitor.log_follower import LogFollower

_GROUPS, _MEMBERS, _ENGINES, _STEP_S = 8, 8, 4, 30.0
_STRETCH = 1 << 23
_METRICS = (
    '"train/loss":0.1,"train/entropy":0.9,"train/grad_norm":1.2,"train/clip_fraction":0.02,"train/behaviour_kl":0.001'
)


def make_step(step: int) -> list[str]:
    """Return the lines of one training step, as a run writes them."""
    start = int(step * _STEP_S * 1e6)
    lines = [f'[{start},"step.begin","train",{{"trained":{step},"groups":{_GROUPS}}}]']
    lines.append(f'[{start},"state","train",{{"old":"waiting","new":"running"}}]')
    for group in range(_GROUPS):
        number = step * _GROUPS + group
        at = start + group * 3_000_000
        lines.append(f'[{at},"group.start","generate",{{"group":{number},"position":{number},"served":{step}}}]')
        for member in range(_MEMBERS):
            sample, engine, now = f"{number}.{member}", (group + member) % _ENGINES, at + member * 300_000
            lines += (
                f'[{now},"sample.start","generate",{{"sample":"{sample}"}}]',
                f'[{now + 10},"request.start","engine/{engine}",{{"request":"{sample}/0"}}]',
                f'[{now + 200_000},"request.end","engine/{engine}",{{"request":"{sample}/0","actions":{200 + member},"finish":"stop"}}]',
                f'[{now + 200_010},"sample.finish","generate",{{"sample":"{sample}","actions":{200 + member},"oldest":{step},"newest":{step}}}]',
                f'[{now + 200_020},"score.start","reward",{{"sample":"{sample}"}}]',
                f'[{now + 250_000},"score.end","reward",{{"sample":"{sample}"}}]',
                f'[{now + 250_010},"state","reward",{{"old":"waiting","new":"running"}}]',
                f'[{now + 250_020},"state","reward",{{"old":"running","new":"waiting"}}]',
            )
        lines.append(f'[{at + 2_900_000},"group.ready","reward",{{"group":{number},"reward":0.5}}]')
        trained = f'"group":{number},"trained":{step},"oldest":{max(0, step - 1)},"in_flight":0,"in_queue":1,"samples":8,"actions":1600'
        lines.append(f'[{at + 2_900_010},"group.train","train",{{{trained}}}]')
        lines += (
            f'[{at + 2_900_020},"sample.end","train",{{"sample":"{number}.{m}","end":"trained"}}]' for m in range(8)
        )
    end = start + int(_STEP_S * 1e6) - 10
    lines += (f'[{end - 5},"served","engine/{n}",{{"version":{step},"trained":{step}}}]' for n in range(_ENGINES))
    lines.append(f'[{end - 1},"state","train",{{"old":"running","new":"waiting"}}]')
    reward = 0.2 + 0.6 * step / (step + 2000)
    lines.append(
        f'[{end},"step.end","train",{{"trained":{step + 1},"groups":8,"samples":64,"reward":{reward:.4f},{_METRICS}}}]'
    )
    return lines


def write_log(directory: Path, events: int) -> int:
    """Write a log of about so many events in stretches; return how many there are."""
    stretches = directory / STRETCHES
    stretches.mkdir(parents=True)
    written, number, held, size = 0, 1, list[str](), 0
    step = 0
    while written < events:
        lines = make_step(step)
        step, written = step + 1, written + len(lines)
        held += lines
        size += sum(map(len, lines))
        if size > _STRETCH:
            with gzip.open(stretches / f"{number:06d}.jsonl.gz", "wt", compresslevel=1) as log:
                log.write("\n".join(held) + "\n")
            number, held, size = number + 1, [], 0
    (directory / LOG_FILE).write_text("\n".join(held) + "\n" if held else "")
    return written


@contextmanager
def serve(root: Path) -> Iterator[tuple[str, int]]:
    """Start the dashboard; yield its address and its process."""
    command = [sys.executable, "-m", "headway", "dashboard", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0], process.pid
        finally:
            process.terminate()


def read_memory_mb(pid: int) -> float:
    """Return the most memory that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return float("nan")


def read_cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def ask(address: str, path: str) -> dict[str, object]:
    request = urllib.request.Request(f"{address}/api/{path}", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request) as answer:
        body = answer.read()
    found: dict[str, object] = json.loads(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    return found


async def time_page(address: str, steps: int) -> float:
    """Return the seconds from opening the page in Chromium to curves of all steps and a whole timeline."""
    async with open_browser() as browser:
        page = await browser.open("about:blank")
        begun_s = time.monotonic()
        await page.show(f"{address}/#/overview?run=run")
        known = f"document.querySelector('.progress b')?.innerText.replace(/\\D/g, '') == {steps}"
        await page.wait(f"{known} && document.querySelector('.chart canvas')", timeout_s=900)
        return time.monotonic() - begun_s


def prepare_log(events: int, logs: Path) -> tuple[Path, dict[str, float]]:
    """Write a log and its index where there is none yet; return its directory and what the index took."""
    root = logs / str(events)
    facts = root / "facts.json"
    if facts.exists():
        return root, json.loads(facts.read_text())
    run = root / "run"
    written = write_log(run, events)
    print(f"{written:,} events are written", file=sys.stderr, flush=True)
    begun_s, cpu_s = time.monotonic(), time.process_time()
    follower = LogFollower(run)
    while follower.advance():
        pass
    found = {"events": float(written), "parts": len(follower.parts)}
    found |= {"index_cpu_s": time.process_time() - cpu_s, "index_s": time.monotonic() - begun_s}
    found["index_mb"] = sum(path.stat().st_size for path in run.glob("event_index/*")) / 1e6
    found["log_mb"] = sum(path.stat().st_size for path in run.glob(f"{STRETCHES}/*")) / 1e6
    found["steps"] = sum(len(part.steps) for part in follower.all_parts())
    follower.close()
    facts.write_text(json.dumps(found))
    print(f"indexed: {found}", file=sys.stderr, flush=True)
    return root, found


def measure_open(events: int, logs: Path) -> dict[str, float]:
    root, found = prepare_log(events, logs)
    steps = int(found["steps"])
    with serve(root) as (address, pid):
        begun_s, cpu_s = time.monotonic(), read_cpu_s(pid)
        while (head := ask(address, "run/curves?run=run")) and head["step"][-1:] != [steps]:  # type: ignore[index]
            time.sleep(0.01)
        found |= {"open_s": time.monotonic() - begun_s, "open_cpu_s": read_cpu_s(pid) - cpu_s}
        for name, path in (
            ("timeline", "run/timeline?run=run&bins=900"),
            ("zoom", f"run/timeline?run=run&from={steps * 15}&to={steps * 15 + 20}"),
        ):
            begun_s, cpu_s = time.monotonic(), read_cpu_s(pid)
            ask(address, path)
            found |= {f"{name}_s": time.monotonic() - begun_s, f"{name}_cpu_s": read_cpu_s(pid) - cpu_s}
        found["memory_mb"] = read_memory_mb(pid)
    print(f"opened: {found}", file=sys.stderr, flush=True)
    if find_chromium():
        with serve(root) as (address, pid):
            found["page_s"] = asyncio.run(time_page(address, steps))
            found["memory_mb"] = max(found["memory_mb"], read_memory_mb(pid))
    return found


def measure_cost(model: Path, steps: int, rounds: int, scratch: Path) -> dict[str, float]:
    """Return processor seconds of training, with a page that follows it and without."""
    words = [f"pretrain={model}", f"max_steps={steps}", "rollout_batch_size=4", "num_return_sequences_in_group=8"]
    words += [
        "prompt_length=48",
        "response_length=12",
        "eval_steps=0",
        "save_steps=1000",
        "processes=false",
        "track_with=[]",
    ]
    words += [
        "actor_train.data_args.file_name=addition",
        "rewards.sums.reward_fn=numeric",
        "rewards.sums.tag_included=addition",
    ]
    words += ["filter_zero_variance=false", "actor_train.training_args.per_device_train_batch_size=8"]
    found: dict[str, list[float]] = {"closed": [], "open": []}
    page_s = list[float]()
    for number in range(rounds):
        for kind in ("closed", "open") if number % 2 == 0 else ("open", "closed"):
            root = scratch / f"{kind}-{number}"
            root.mkdir()
            with serve(root) as (address, pid):
                command = [sys.executable, "-m", "headway", "train", f"output_dir={root}/run", *words, "--no-dashboard"]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                begun_s, page_cpu_s = time.monotonic(), read_cpu_s(pid)
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
                stream = None
                if kind == "open":
                    stream = subprocess.Popen(
                        ["curl", "-sN", f"{address}/api/stream?run=run"], stdout=subprocess.DEVNULL
                    )
                _, status, usage = os.wait4(process.pid, 0)
                assert status == 0
                found[kind].append(usage.ru_utime + usage.ru_stime)
                if stream is not None:
                    page_s.append((read_cpu_s(pid) - page_cpu_s) / (time.monotonic() - begun_s))
                    stream.terminate()
                    stream.wait()
            print(f"{kind}: {found[kind][-1]:.2f} s of processor time", file=sys.stderr, flush=True)
    means = {kind: sum(values) / len(values) for kind, values in found.items()}
    return {
        **means,
        "difference": means["open"] / means["closed"] - 1,
        "page_share_of_a_core": sum(page_s) / len(page_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name in ("open", "write"):
        opening = kinds.add_parser(name)
        opening.add_argument("--events", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
        opening.add_argument("--logs", type=Path, help="directory where logs are kept for the next time")
    cost = kinds.add_parser("cost")
    cost.add_argument("--model", type=Path, required=True, help="directory of a tiny model")
    cost.add_argument("--steps", type=int, default=60)
    cost.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, suppress(KeyboardInterrupt):
        if args.kind == "cost":
            print(json.dumps(measure_cost(args.model, args.steps, args.rounds, Path(name)), indent=2))
            return
        for events in args.events:
            logs = args.logs or Path(name)
            found = prepare_log(events, logs)[1] if args.kind == "write" else measure_open(events, logs)
            print(json.dumps({key: round(value, 3) for key, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
