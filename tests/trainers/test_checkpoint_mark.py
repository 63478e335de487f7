"""A checkpoint that is not as it was written is found out, whatever happened to it; an old one is used unchecked."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from headway.errors import TrainerError
from headway.trainers.checkpoint_mark import (
    compute_file_checksum,
    read_completion_mark,
    verify_checkpoint,
    verify_model,
    write_completion_mark,
)
from tests.runs.damage import DAMAGES, apply_damage

FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "vae/config.json")
NEEDED = FILES[:2]


def make_checkpoint(directory: Path) -> Path:
    for number, name in enumerate(FILES):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(bytes(range(number, number + 200)))
    write_completion_mark(directory, version=7, kl={"coefficient": 0.1})
    return directory


def test_a_whole_checkpoint_says_what_it_was_written_with(tmp_path: Path) -> None:
    mark = read_completion_mark(make_checkpoint(tmp_path))
    assert (mark.version, mark.kl, sorted(mark.files or ())) == (7, {"coefficient": 0.1}, sorted(FILES))
    assert verify_checkpoint(tmp_path, NEEDED) == []
    verify_model(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", (*FILES, "trainer.json"))
def test_every_damage_to_every_file_is_found(tmp_path: Path, name: str, damage: str) -> None:
    make_checkpoint(tmp_path)
    apply_damage(tmp_path / name, damage, other=tmp_path / ("config.json" if name != "config.json" else FILES[0]))
    if name in NEEDED or name == "trainer.json" or damage == "swapped":
        with pytest.raises(TrainerError, match=r"is damaged|holds no complete checkpoint"):
            verify_checkpoint(tmp_path, (*NEEDED, "config.json") if damage == "swapped" else NEEDED)
    else:
        (note,) = verify_checkpoint(tmp_path, NEEDED)
        assert f"{name} is damaged" in note


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_a_flip_anywhere_in_the_mark_is_found(tmp_path: Path, place: int) -> None:
    mark = make_checkpoint(tmp_path) / "trainer.json"
    whole = read_completion_mark(tmp_path)
    text = bytearray(mark.read_bytes())
    text[place % len(text)] ^= 1
    mark.write_bytes(bytes(text))
    with suppress(TrainerError):
        assert read_completion_mark(tmp_path) == whole  # a blank became another one


def test_the_optimizer_is_not_read_to_serve_a_model(tmp_path: Path) -> None:
    (make_checkpoint(tmp_path) / "optimizer.safetensors").write_bytes(b"")
    verify_model(tmp_path)
    (tmp_path / "vae" / "config.json").write_bytes(b"{}")
    with pytest.raises(TrainerError, match=r"vae/config\.json is damaged: it has 2 bytes instead of 200"):
        verify_model(tmp_path)


def test_a_checkpoint_without_checksums_is_used_and_told(tmp_path: Path) -> None:
    (tmp_path / "trainer.json").write_text(json.dumps({"format": 1, "version": 3, "kl": {}}))
    assert read_completion_mark(tmp_path).files is None
    (note,) = verify_checkpoint(tmp_path, NEEDED)
    assert "without checksums: it is used unchecked" in note
    verify_model(tmp_path)


def test_a_file_of_many_parts_has_the_checksum_of_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(70 << 20)
    whole = compute_file_checksum(path)
    found = {whole}
    for place in (0, (32 << 20) - 1, 32 << 20, (70 << 20) - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        found.add(compute_file_checksum(path))
    assert len(found) == 5 and whole.endswith(f":{70 << 20}")
