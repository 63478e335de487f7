"""One template and one model for all runs of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.runs.factory import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    from tests.runs.factory import Runs
    from tests.runs.template import Template

    directory: Path = tmp_path_factory.mktemp("runs")
    template = Template(directory)
    try:
        assert template.call("tests.runs.factory:make_model", str(directory / "model")) == 0
        yield Runs(template, directory / "model")
    finally:
        template.close()
