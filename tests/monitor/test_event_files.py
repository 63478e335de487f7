"""The event log on disk: rotation, compression, kills in between, damage, and what it costs per sample."""

import gzip
import threading
from pathlib import Path

import pytest

from headway.monitor import event_files
from headway.monitor.event_files import (
    LOG_FILE,
    EventFileWriter,
    last_written_s,
    read_event_lines,
    read_event_log,
    read_last_event_s,
)
from headway.monitor.event_log import LoggedEvent, encode_event
from headway.monitor.events import RequestEnd, RequestStart, SampleEnd, SampleFinish, SampleStart, StateChange, StepEnd

STEPS, SAMPLES = 60, 32


def make_step(step: int) -> list[LoggedEvent]:
    """Return the events of a step of `SAMPLES` samples, as a real run has them."""
    found, time_s = list[LoggedEvent](), float(step)
    for number in range(SAMPLES):
        sample, time_s = f"{step}.{number}", time_s + 0.01
        for event in (
            SampleStart(who="generate", sample=sample),
            RequestStart(who="engine/0", request=f"{sample}/0"),
            RequestEnd(who="engine/0", request=f"{sample}/0", actions=17 * number, finish="stop"),
            SampleFinish(who="generate", sample=sample, actions=17 * number, oldest=step, newest=step),
            StateChange(who="reward", old="waiting", new="running"),
            SampleEnd(who="train", sample=sample, end="trained"),
        ):
            found.append(LoggedEvent(time_s, event))
    return [*found, LoggedEvent(time_s + 0.01, StepEnd(who="train", trained=step + 1, samples=SAMPLES))]


def write_steps(directory: Path, first: int = 0, last: int = STEPS) -> list[str]:
    """Write whole steps to the log of a run and return their lines."""
    written = list[str]()
    with EventFileWriter(directory, on_failure=pytest.fail) as log:
        for step in range(first, last):
            for event in make_step(step):
                log(event)
                written.append(encode_event(event) + "\n")
    return written


def test_a_run_that_is_resumed_reads_as_one_log(tmp_path: Path) -> None:
    written = write_steps(tmp_path) + write_steps(tmp_path, STEPS, STEPS + 20)
    assert list(read_event_lines(tmp_path)) == list(read_event_lines(tmp_path / LOG_FILE)) == written
    assert len(list(read_event_log(tmp_path))) == len(written)
    assert read_last_event_s(tmp_path) == pytest.approx(STEPS + 19 + 0.33)


def test_an_ended_run_takes_less_than_300_bytes_a_sample(tmp_path: Path) -> None:
    write_steps(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".gz", ".index"}
    assert sum(path.stat().st_size for path in files) < 300 * STEPS * SAMPLES


def test_a_run_under_way_takes_less_than_300_bytes_a_sample(tmp_path: Path) -> None:
    with EventFileWriter(tmp_path, on_failure=pytest.fail) as log:
        for step in range(STEPS):
            for event in make_step(step):
                log(event)
        log._pack_in_background()  # waits for the stretch before it
        assert (tmp_path / LOG_FILE).exists()
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 300 * STEPS * SAMPLES


def test_few_files_hold_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "_SMALLEST_STRETCH", 1)
    write_steps(tmp_path, 0, 300)
    assert len(list((tmp_path / "events").iterdir())) < 70


def test_a_kill_between_moving_and_compressing_loses_and_repeats_nothing(tmp_path: Path) -> None:
    written = write_steps(tmp_path)
    stretch = sorted((tmp_path / "events").iterdir())[-1]
    plain = stretch.with_suffix("")
    plain.write_bytes(gzip.decompress(stretch.read_bytes()))  # both forms exist for a moment
    assert list(read_event_lines(tmp_path)) == written
    stretch.unlink()  # killed while it was being compressed
    plain.with_name(plain.name + ".part").write_bytes(b"half")
    assert list(read_event_lines(tmp_path)) == written
    written += write_steps(tmp_path, STEPS, STEPS + 1)
    assert list(read_event_lines(tmp_path)) == written
    assert {path.suffix for path in (tmp_path / "events").iterdir()} == {".gz"}


@pytest.mark.parametrize("damage", ["truncated", "zeroed", "missing"])
def test_a_damaged_stretch_leaves_the_others_readable(tmp_path: Path, damage: str) -> None:
    written = write_steps(tmp_path)
    stretch = sorted((tmp_path / "events").iterdir())[1]
    lines = gzip.decompress(stretch.read_bytes()).decode().splitlines(keepends=True)
    match damage:
        case "truncated":
            stretch.write_bytes(stretch.read_bytes()[:-200])
        case "zeroed":
            stretch.write_bytes(b"\0" * stretch.stat().st_size)
        case "missing":
            stretch.unlink()
    everything = list(read_event_lines(tmp_path))
    found = [line for line in everything if "is damaged" not in line]
    kept = set(found)
    assert len(everything) == len(found) + (damage != "missing")
    assert set(written) - kept <= set(lines) and found == [line for line in written if line in kept]
    assert len(list(read_event_log(tmp_path))) == len(everything)


def test_a_reader_sees_every_event_once_while_a_run_writes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_event_log(tmp_path))
    writer = threading.Thread(target=write_steps, args=(tmp_path,))
    writer.start()
    while writer.is_alive():
        try:
            found = list(read_event_lines(tmp_path))
        except FileNotFoundError:
            continue
        samples = [line for line in found if "sample.start" in line and line.endswith("\n")]
        assert len(samples) == len(set(samples))
        assert (
            not samples or [f'"{n // SAMPLES}.{n % SAMPLES}"' in line for n, line in enumerate(samples)].count(0) == 0
        )
    writer.join()
    assert last_written_s(tmp_path) > 0


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    reasons = list[str]()
    with EventFileWriter(tmp_path, on_failure=reasons.append) as log:
        (tmp_path / "events").write_text("in the way")
        for event in make_step(0) * 20:
            log(event)
    assert len(reasons) == 1 and reasons[0].startswith("the event log cannot be written: ")
