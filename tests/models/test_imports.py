"""Naming a model does not cost an import of torch."""

from __future__ import annotations

import subprocess
import sys


def test_the_package_is_imported_without_torch_or_transformers() -> None:
    heavy = ["huggingface_hub", "torch", "transformers"]
    code = f"import sys, headway.models; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
