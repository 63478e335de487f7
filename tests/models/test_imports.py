"""Naming a model does not cost an import of torch, and says so where one is needed and missing."""

from __future__ import annotations

import subprocess
import sys


def test_the_package_is_imported_without_torch_or_transformers() -> None:
    heavy = ["huggingface_hub", "torch", "transformers"]
    imports = "import sys, headway.models.model_loading, headway.models.model_names"
    code = f"{imports}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_not_installed_is_named_with_the_way_to_install_it() -> None:
    lines = (
        "import sys",
        "from headway.errors import ConfigError",
        "from headway.models.model_names import resolve_model",
        "sys.modules['huggingface_hub'] = None",
        "try: resolve_model('org/name')",
        "except ConfigError as error: print(error)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert "pip install '" in done.stdout
