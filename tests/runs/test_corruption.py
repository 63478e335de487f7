"""A run whose files were damaged goes on from what is whole and says so, or refuses in one line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.damage import DAMAGES, apply_damage, swap_tensors
from tests.runs.factory import Runs, audit, events

STEPS = 4


@pytest.fixture(scope="module")
def base(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after its fourth step, with two checkpoints."""
    run = runs.train(tmp_path_factory.mktemp("corruption") / "run", max_steps=STEPS, save_steps=2)
    assert run.end() == 0, run.text
    return run.directory


@pytest.fixture
def directory(base: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, which may be damaged."""
    copy = tmp_path / "run"
    shutil.copytree(base, copy, ignore=shutil.ignore_patterns("control.sock"))
    yield copy
    shutil.rmtree(copy)


def steps_after(directory: Path) -> list[int]:
    """The steps that were made after the run of the fixture."""
    return [event.data["trained"] for event in events(directory, "step.end")][STEPS:]


def resume(runs: Runs, directory: Path) -> tuple[int, str]:
    run = runs.train(directory, max_steps=STEPS + 1, save_steps=2)
    code = run.end()
    assert "Traceback" not in run.text, run.text
    return code, run.text


def newest(directory: Path) -> Path:
    return directory / "checkpoints" / f"step-{STEPS:08d}"


def test_exchanged_tensors_are_not_trained_on(runs: Runs, directory: Path) -> None:
    swap_tensors(newest(directory) / "model.safetensors")
    code, text = resume(runs, directory)
    assert code == 0, text
    assert "the checkpoint of step 4 cannot be read and is passed over" in text and "its checksum differs" in text
    assert steps_after(directory) == [3, 4, 5]
    audit(directory)


def test_damage_to_all_side_files_at_once_hides_no_checkpoint(runs: Runs, directory: Path) -> None:
    side = [*directory.glob("*.jsonl"), *directory.glob("events/*"), directory / "report.html", directory / "run.lock"]
    side += [newest(directory) / name for name in ("config.json", "tokenizer.json", "files.json")]
    for path in filter(Path.exists, side):
        apply_damage(path, "flipped", other=path)
    code, text = resume(runs, directory)
    assert code == 0 and "going on from step 4" in text, text
    assert "tokenizer.json is damaged" in text
    assert [event.data["trained"] for event in events(directory, "step.end")][-1] == 5
    audit(directory)


def test_a_checkpoint_of_an_older_headway_is_used_and_told(runs: Runs, directory: Path) -> None:
    (newest(directory) / "trainer.json").write_text('{"format": 1, "version": 4, "kl": {}}')
    code, text = resume(runs, directory)
    assert code == 0 and "without checksums: it is used unchecked" in text, text
    assert steps_after(directory) == [5]


def test_a_damaged_ledger_is_refused_in_one_line(runs: Runs, directory: Path) -> None:
    (directory / "ledger.sqlite-wal").unlink(missing_ok=True)
    ledger = directory / "ledger.sqlite"
    data = bytearray(ledger.read_bytes())
    for place in range(4096, len(data), 512):
        data[place] ^= 0xFF
    ledger.write_bytes(bytes(data))
    code, text = resume(runs, directory)
    assert code in (1, 2) and "ledger.sqlite" in text and steps_after(directory) == [], text


def list_files(directory: Path) -> list[str]:
    """The files of a run directory, by their names in it."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


@pytest.mark.soak
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_whole_matrix(runs: Runs, base: Path, tmp_path: Path, damage: str) -> None:
    """Each file of the directory: 0 with all steps from what is whole, or one line; never a traceback."""
    table: list[str] = []
    for number, name in enumerate(list_files(base)):
        copy = tmp_path / f"run-{number}"
        shutil.copytree(base, copy, ignore=shutil.ignore_patterns("control.sock"))
        mates = [path for path in copy.rglob(f"*{Path(name).suffix}") if path.is_file() and path != copy / name]
        apply_damage(copy / name, damage, other=mates[0] if mates else copy / "config.yaml")
        code, text = resume(runs, copy)
        where = f"{damage} {name}: exit {code}, steps {steps_after(copy)}"
        if code == 0:
            weights = name.endswith((".safetensors", "trainer.json")) and f"step-{STEPS:08d}" in name
            possible = [[3, 4, 5]] if weights else [[5], [3, 4, 5]] if damage == "swapped" else [[5]]
            assert steps_after(copy) in possible or "events" in name, f"{where}\n{text}"
            audit(copy)
        else:
            told = [line for line in text.splitlines() if line.strip() and not line.startswith(("note:", "go on with"))]
            assert code in (1, 2) and told, where
            where += f": {told[-1][:160]}"
        table.append(where)
        shutil.rmtree(copy)
    print("\n".join(table))
