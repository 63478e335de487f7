"""`headway pretrain` makes a model that `pretrain:` takes, in whole or half precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from headway.cli import main  # noqa: E402
from headway.data.generated_tasks import StringSet  # noqa: E402
from headway.denoising import pretraining  # noqa: E402
from headway.denoising.models.denoiser_storage import load_small_mmdit  # noqa: E402
from headway.denoising.models.mmdit import MmditConfig  # noqa: E402
from headway.denoising.text_rendering import TextImageStyle  # noqa: E402


def test_a_model_is_made_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    base = pretraining.PretrainingSettings(
        model=MmditConfig(height=8, width=24, alphabet="012345", characters=4, dim=8, depth=1, heads=1),
        strings=StringSet(alphabet="012345"),
        style=TextImageStyle(height=8, width=24, alphabet="012345"),
        batch=2,
    )
    monkeypatch.setattr(pretraining, "BASE_PRETRAINING", base)
    monkeypatch.setattr("headway.cli.pretrain_command._HELD_OUT", 1)
    monkeypatch.setenv("PATH", "")  # no second reader
    try:
        assert main(["pretrain", str(tmp_path), "--steps", "2", "--seed", "5", "--wrong", "0.5", "--half"]) == 0
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "step     2 of 2" in said and "tesseract: " in said and "parameters" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    wanted = pretraining.Pretrainer(replace(base, steps=2, seed=5, style=replace(base.style, wrong=0.5)))
    for _ in range(2):
        wanted.advance()
    for name, tensor in load_small_mmdit(tmp_path).state_dict().items():
        assert torch.allclose(tensor, wanted.average.state_dict()[name], atol=1e-3), name


def test_what_is_no_option_is_refused(tmp_path: Path) -> None:
    assert main(["pretrain", str(tmp_path), "steps=3"]) == 2
