"""A checkpoint that is not there is refused before a directory is made."""

from pathlib import Path

import pytest

from headway.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.yaml"


def test_a_run_from_a_checkpoint_that_is_not_there_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(EXAMPLE), "pretrain=tiny-sums", f"output_dir={run}", "resume=/no/such"]) == 2
    assert "resume = '/no/such': is no checkpoint of a run" in capsys.readouterr().err
    assert not run.exists()
