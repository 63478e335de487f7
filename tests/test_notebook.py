"""The notebook of the tour runs from top to bottom, and what it says of α is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"


def test_code_of_the_notebook_compiles_and_has_no_outputs() -> None:
    import ast
    import json

    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), NOTEBOOK.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            assert cell["outputs"] == []


@pytest.mark.docs
def test_the_notebook_runs() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(str(output.get("text", "")) for output in outputs)
    assert "True {1:" in text and "expected" in text
    seconds = [float(found) for found in re.findall(r"α = \d: +([\d.]+) s a step", text)]
    assert len(seconds) == 3 and seconds[0] > max(seconds[1:])
